//! How many compilations run at a time: now and then fewer than there are threads.
//!
//! A model's units arrive one after another, within a few tenths of a second, in the order in which the model calls them.
//! Whatever is started at once occupies a core for a second, and the longest unit, which decides when the model is ready,
//! may come last and find none free. So while units keep arriving only an eighth of the threads begin one; when they have
//! stopped, or somebody waits for a unit, which says the same, the others begin with the heaviest. A unit that outweighs all
//! that run does not wait, see [`super::pool`]; and nothing waits once there is twice as much to do as there are threads, or
//! after a third of a second: then the order matters less than the idle cores.
//!
//! Threads that share a core also slow each other, and the longest unit with them. Where half of the threads can finish
//! everything while the longest runs, the other half would only be in its way. That is asked once the units have arrived;
//! the answer is not taken back while they compile.
//!
//! Measured on 16 virtual cores that share 8 real ones, three times each, in turns: a model with 24 forward and backward
//! units was ready 2.89 s after XLA without any of this, 2.42 s with an eighth, 2.89 s with a quarter and 2.79 s with half
//! of the threads at first; twelve forward units by themselves took 2.04 s on all threads and 1.72 s on half of them.

use std::time::{Duration, Instant};

/// Fewer threads than this are always used as they are: what they cannot begin at once waits in order of weight anyway.
const FEWEST: usize = 8;

/// Nothing more is expected when nothing has come for twice as long as it took the last one to come after the one before
/// it: large payloads come slowly. Within these bounds.
const SETTLED: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(60));

/// The longest that threads are held back for jobs that may come.
const PATIENCE: Duration = Duration::from_millis(300);

/// What is to be done, queued or running, in units of weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Load {
    /// How many jobs.
    pub(super) jobs: usize,
    /// All together.
    pub(super) total: u64,
    /// The heaviest.
    pub(super) largest: u64,
}

impl Load {
    /// Adds one job.
    #[must_use]
    pub(super) fn and(self, weight: u64) -> Self {
        Self { jobs: self.jobs + 1, total: self.total.saturating_add(weight), largest: self.largest.max(weight) }
    }
}

/// How many jobs may run now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Limit {
    /// The most jobs.
    pub(super) jobs: usize,
    /// After how long to ask again, where the number will change by itself.
    pub(super) changes_in: Option<Duration>,
}

/// The pace of one pool.
#[derive(Debug)]
pub(super) struct Pace {
    threads: usize,
    /// Whether the threads may have to share cores.
    crowded: bool,
    first_arrival: Option<Instant>,
    last_arrival: Option<Instant>,
    /// How long nothing must arrive from then on.
    settled: Duration,
    awaited: bool,
    /// What was allowed since there was nothing to do.
    allowed: usize,
}

impl Pace {
    /// The pace of a pool with so many threads, on so many (perhaps virtual) cores.
    #[must_use]
    pub(super) const fn new(threads: usize, cores: usize) -> Self {
        Self {
            threads,
            crowded: threads * 2 > cores,
            first_arrival: None,
            last_arrival: None,
            settled: SETTLED.1,
            awaited: false,
            allowed: 0,
        }
    }

    /// A job was queued. `first`: there was nothing to do before.
    pub(super) fn arrived(&mut self, now: Instant, first: bool) {
        if first {
            self.first_arrival = Some(now);
            self.settled = SETTLED.0;
            self.awaited = false;
            self.allowed = 0;
        } else if let Some(last) = self.last_arrival {
            self.settled = (2 * now.saturating_duration_since(last)).clamp(SETTLED.0, SETTLED.1);
        }
        self.last_arrival = Some(now);
    }

    /// Somebody waits for a job: no more will come before it is done.
    pub(super) fn awaited(&mut self) {
        self.awaited = true;
    }

    /// How many jobs may run.
    pub(super) fn limit(&mut self, now: Instant, load: Load) -> Limit {
        if self.threads < FEWEST {
            return Limit { jobs: self.threads, changes_in: None };
        }
        let rest = |since: Option<Instant>, whole: Duration| whole.checked_sub(now.saturating_duration_since(since?));
        let few = !self.awaited && load.jobs < 2 * self.threads;
        let rest = rest(self.last_arrival, self.settled).min(rest(self.first_arrival, PATIENCE)).filter(|_| few);
        if let Some(rest) = rest.filter(|rest| !rest.is_zero()) {
            return Limit { jobs: self.threads / 8, changes_in: Some(rest) };
        }
        // An eighth is left for what does not fit together evenly.
        let half = self.threads / 2;
        let half_will_do = load.total > 0 && load.total <= (load.largest / 8).saturating_mul(half as u64 * 7);
        let wanted = if self.crowded && half_will_do { half } else { self.threads };
        self.allowed = self.allowed.max(wanted);
        Limit { jobs: self.allowed, changes_in: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(weights: &[u64]) -> Load {
        weights.iter().fold(Load::default(), |load, weight| load.and(*weight))
    }

    /// The weights of one forward unit of each of twelve convolutions, as they come from real payloads, in kilobytes.
    const FORWARD: [u64; 12] = [95, 207, 187, 287, 266, 367, 115, 251, 229, 351, 329, 451];

    #[test]
    fn few_threads_are_all_used_at_once() {
        let now = Instant::now();
        let mut pace = Pace::new(7, 7);
        pace.arrived(now, true);
        assert_eq!(pace.limit(now, load(&FORWARD)), Limit { jobs: 7, changes_in: None });
    }

    #[test]
    fn while_jobs_arrive_an_eighth_of_the_threads_works() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let milliseconds = Duration::from_millis;
        let mut pace = Pace::new(16, 16);
        for (index, (arrival, settled)) in [(0, 10), (12, 24), (13, 10), (43, 60), (143, 60)].into_iter().enumerate() {
            pace.arrived(at(arrival), index == 0);
            let held_back = Limit { jobs: 2, changes_in: Some(milliseconds(settled)) };
            assert_eq!(pace.limit(at(arrival), load(&FORWARD)), held_back, "{arrival}");
        }
        let held_back = Limit { jobs: 2, changes_in: Some(milliseconds(1)) };
        assert_eq!(pace.limit(at(202), load(&FORWARD)), held_back);
        assert_eq!(pace.limit(at(203), load(&FORWARD)).jobs, 8);
    }

    #[test]
    fn arrivals_without_end_hold_nothing_back() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let mut pace = Pace::new(16, 16);
        for index in 0..10 {
            pace.arrived(at(index * 40), index == 0);
            let limit = pace.limit(at(index * 40), load(&FORWARD)).jobs;
            assert_eq!(limit == 2, index * 40 < 300, "{index}: {limit}");
        }
        pace.arrived(begin, true);
        assert_eq!(pace.limit(begin, load(&[1; 31])).jobs, 2);
        assert_eq!(pace.limit(begin, load(&[1; 32])).jobs, 16);
    }

    #[test]
    fn who_waits_ends_the_arrivals() {
        let now = Instant::now();
        let mut pace = Pace::new(16, 16);
        pace.arrived(now, true);
        pace.awaited();
        assert_eq!(pace.limit(now, load(&[1; 24])), Limit { jobs: 16, changes_in: None });
        // The next job after a pause begins anew.
        pace.arrived(now, true);
        assert_eq!(pace.limit(now, load(&[1; 24])).jobs, 2);
    }

    #[test]
    fn half_the_threads_do_where_one_unit_outlasts_the_rest() {
        let now = Instant::now();
        let settled = |pace: &mut Pace, weights: &[u64]| pace.limit(now + SETTLED.1, load(weights)).jobs;
        let mut pace = Pace::new(16, 16);
        pace.arrived(now, true);
        assert_eq!(settled(&mut pace, &FORWARD), 8);
        // More has come: all threads are needed, and stay allowed while there is work.
        let both = [FORWARD, FORWARD.map(|weight| weight * 3 / 2)].concat();
        assert_eq!(settled(&mut pace, &both), 16);
        assert_eq!(settled(&mut pace, &FORWARD), 16);
        // Where each thread has a core of its own nothing is held back.
        let mut roomy = Pace::new(16, 64);
        roomy.arrived(now, true);
        assert_eq!(settled(&mut roomy, &FORWARD), 16);
    }

    #[test]
    fn weights_beyond_reason_do_not_overflow() {
        let now = Instant::now();
        let mut pace = Pace::new(16, 16);
        pace.arrived(now, true);
        assert_eq!(pace.limit(now + SETTLED.1, load(&[u64::MAX, u64::MAX, 1])).jobs, 8);
        // Jobs of no weight tell nothing.
        assert_eq!(pace.limit(now + SETTLED.1, Load::default()).jobs, 16);
    }
}
