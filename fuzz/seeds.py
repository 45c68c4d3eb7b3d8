"""Writes seeds for the fuzz targets to fuzz/corpus: a few of our own, and the payloads (.json) and models named as arguments."""

import json
import pathlib
import sys

SOURCE = """#define EACH(N, I, ...) \\
  for (int I = 0; I < N; I++) { __VA_ARGS__ }
using REAL = float;
struct Graph { void* rows; unsigned long count; };
template<int N> __device__ __forceinline__ void add(REAL* a) { EACH(N, i, a[i] += 0x1.8p-1f;) }
__global__ void
__launch_bounds__(192)
forward(REAL* a) { extern __shared__ char s[]; add<3>(a); } // first
__global__ void backward(REAL* a, Graph graph) { const char* s = "{\\""; char c = '}'; }
"""
LAUNCH = {"num_blocks": 1, "num_threads": 32, "warp_size": 32, "smem": 0}
PROPERTIES = {
    "L1_dim": 1, "L2_dim": 1, "L3_dim": 1, "weight_numel": 1, "shared_weights": 0, "opt_level": 3, "irrep_dtype": 1,
    "weight_dtype": 2, "workspace_size": 1, "deterministic": 1, "idx_dtype": 3, "new": [{"a": [1.5e3, None]}],
}
OWN = {
    "kernel": SOURCE, "forward_config": LAUNCH, "backward_config": LAUNCH, "double_backward_config": LAUNCH,
    "kernel_prop": PROPERTIES,
}


def main():
    corpus = pathlib.Path(__file__).parent / "corpus"
    payloads = {"own": json.dumps(OWN)}
    named = {str(index): pathlib.Path(path) for index, path in enumerate(sys.argv[1:])}
    payloads |= {name: path.read_text("utf-8") for name, path in named.items() if path.suffix == ".json"}
    for target in ("payload_json", "source", "model"):
        (corpus / target).mkdir(parents=True, exist_ok=True)
    for name, text in payloads.items():
        (corpus / "payload_json" / name).write_text(text, "utf-8")
        (corpus / "source" / name).write_text(json.loads(text)["kernel"], "utf-8")
    for name, path in named.items():
        (corpus / "model" / name).write_bytes(path.read_bytes())


if __name__ == "__main__":
    main()
