//! Which functions of a module call which, and how often each is reached.

use std::collections::HashMap;
use std::sync::Arc;

/// The functions of one module, in the order of the file.
#[derive(Default)]
pub(super) struct Functions {
    list: Vec<Function>,
}

#[derive(Default)]
struct Function {
    name: Option<Arc<str>>,
    private: bool,
    /// Names that the body calls, and how many times.
    calls: HashMap<Arc<str>, u64>,
}

impl Functions {
    /// Adds a function, and gives its index.
    pub(super) fn add(&mut self, name: Option<Arc<str>>, private: bool) -> usize {
        self.list.push(Function { name, private, calls: HashMap::new() });
        self.list.len() - 1
    }

    /// The name of a function.
    pub(super) fn name(&self, index: usize) -> Option<Arc<str>> {
        self.list.get(index).and_then(|function| function.name.clone())
    }

    /// Notes a call of `callee` in the body of a function.
    pub(super) fn call(&mut self, from: usize, callee: &str) {
        if let Some(function) = self.list.get_mut(from) {
            if let Some(times) = function.calls.get_mut(callee) {
                *times += 1;
            } else {
                function.calls.insert(callee.into(), 1);
            }
        }
    }

    /// How often each function is reached from the module's entry: `main` if there is one, else every function that is
    /// not private. A function without a name counts as reached once. Counts stop at `u64::MAX`; a call that closes a
    /// circle (which `StableHLO` forbids) is not followed.
    pub(super) fn reached(&self) -> Vec<u64> {
        let by_name: HashMap<&str, usize> =
            self.list.iter().enumerate().filter_map(|(at, f)| Some((f.name.as_deref()?, at))).collect();
        let edges: Vec<Vec<(usize, u64)>> = self
            .list
            .iter()
            .map(|f| f.calls.iter().filter_map(|(name, &times)| Some((*by_name.get(&**name)?, times))).collect())
            .collect();
        let main = by_name.get("main").copied();
        let mut reached: Vec<u64> = (0..self.list.len())
            .map(|at| {
                let function = &self.list[at];
                u64::from(main.map_or(!function.private, |main| main == at) || function.name.is_none())
            })
            .collect();
        let (order, place) = callers_first(&edges);
        for caller in order {
            let times = reached[caller];
            for &(callee, calls) in &edges[caller] {
                // In this order only an edge that closes a circle leads back.
                if place[callee] > place[caller] {
                    reached[callee] = reached[callee].saturating_add(times.saturating_mul(calls));
                }
            }
        }
        reached
    }
}

/// The functions with every caller before what it calls (circles broken), and everyone's place in that order.
fn callers_first(edges: &[Vec<(usize, u64)>]) -> (Vec<usize>, Vec<usize>) {
    let mut order = Vec::with_capacity(edges.len());
    let mut seen = vec![false; edges.len()];
    let mut stack = Vec::new();
    for root in 0..edges.len() {
        if !std::mem::replace(&mut seen[root], true) {
            stack.push((root, 0));
        }
        while let Some((at, next)) = stack.last_mut() {
            if let Some(&(callee, _)) = edges[*at].get(*next) {
                *next += 1;
                if !std::mem::replace(&mut seen[callee], true) {
                    stack.push((callee, 0));
                }
            } else {
                order.push(*at);
                stack.pop();
            }
        }
    }
    order.reverse();
    let mut place = vec![0; edges.len()];
    for (position, &at) in order.iter().enumerate() {
        place[at] = position;
    }
    (order, place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_multiply_along_paths() {
        let mut functions = Functions::default();
        let leaf = functions.add(Some("leaf".into()), true);
        let main = functions.add(Some("main".into()), false);
        let middle = functions.add(Some("middle".into()), true);
        let orphan = functions.add(Some("orphan".into()), false);
        for (caller, callee) in [(main, "middle"), (main, "middle"), (main, "leaf"), (main, "nobody")] {
            functions.call(caller, callee);
        }
        for (caller, callee) in [(middle, "leaf"), (middle, "leaf"), (middle, "leaf"), (orphan, "leaf")] {
            functions.call(caller, callee);
        }
        let reached = functions.reached();
        assert_eq!((reached[main], reached[middle], reached[leaf], reached[orphan]), (1, 2, 7, 0));
    }

    #[test]
    fn circles_end_and_without_main_every_public_function_is_an_entry() {
        let mut functions = Functions::default();
        let first = functions.add(Some("first".into()), false);
        let second = functions.add(Some("second".into()), true);
        let own = functions.add(Some("own".into()), false);
        functions.call(first, "second");
        functions.call(second, "first");
        functions.call(own, "own");
        assert_eq!(functions.reached(), [1, 1, 1]);
    }

    #[test]
    fn a_chain_of_doublings_saturates() {
        let mut functions = Functions::default();
        for level in 0..100 {
            let at = functions.add(Some(format!("f{level}").into()), level != 0);
            functions.call(at, &format!("f{}", level + 1));
            functions.call(at, &format!("f{}", level + 1));
        }
        let reached = functions.reached();
        assert_eq!((reached[0], reached[10], reached[99]), (1, 1024, u64::MAX));
    }
}
