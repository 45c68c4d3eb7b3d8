#!/usr/bin/env bash
# Instructions per warm call, counted by callgrind against a device that does nothing: the stand-in XLA's part included.
# Prints a table beside benches/instructions.txt, and fails where a count grew by more than a fifth. With --record it writes
# the file instead.
set -euo pipefail
cd "$(dirname "$0")/.."
recorded=benches/instructions.txt
binary=$(cargo bench --bench calls --no-run --message-format=json 2>/dev/null |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Two runs of different lengths: what they do not share is the calls.
total() {
  valgrind --tool=callgrind --callgrind-out-file="$scratch/out" "$binary" "$1" "$2" "$3" 2>&1 |
    sed -n 's/.*Collected : \([0-9]*\).*/\1/p'
}
count() { echo $((($(total "$1" "$2" 3000) - $(total "$1" "$2" 1000)) / 2000)); }

[ "${1:-}" = --record ] && : >"$recorded"
worst=0
printf '%-22s %-11s %10s %10s\n' target stage now recorded
for target in tp_forward tp_backward tp_double_backward conv_forward conv_backward conv_double_backward; do
  for stage in execute initialize stateless; do
    now=$(count "$target" "$stage")
    [ "${1:-}" = --record ] && echo "$target $stage $now" >>"$recorded"
    before=$(sed -n "s/^$target $stage //p" "$recorded")
    mark=
    # What threads of the process do meanwhile is counted with it, so that now and then a run shows too much: the least of
    # several counts.
    for _ in 1 2; do
      [ -n "$before" ] && [ $((now * 5)) -gt $((before * 6)) ] || break
      again=$(count "$target" "$stage")
      [ "$again" -ge "$now" ] || now=$again
    done
    if [ -n "$before" ] && [ $((now * 5)) -gt $((before * 6)) ]; then
      mark=' grew' worst=1
    fi
    printf '%-22s %-11s %10s %10s%s\n' "$target" "$stage" "$now" "${before:--}" "$mark"
  done
done
exit $worst
