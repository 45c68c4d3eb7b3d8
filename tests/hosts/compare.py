"""Compares the .npy files of two folders. usage: compare.py EXPECTED FOUND TOLERANCE (relative to the largest element)"""

import pathlib
import sys

import numpy as np

expected, found, tolerance = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3])
files = sorted(expected.glob("output_*.npy"))
assert files, f"no outputs in {expected}"
assert len(list(found.glob("output_*.npy"))) == len(files), f"another number of outputs in {found}"
worst = 0.0
for file in files:
    a, b = np.load(file), np.load(found / file.name)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{file.name}: {a.dtype}{a.shape} and {b.dtype}{b.shape}"
    scale = float(np.max(np.abs(a.astype(np.float64)), initial=0.0)) or 1.0
    difference = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)), initial=0.0)) / scale
    assert np.all(np.isfinite(b)) and difference <= tolerance, f"{file.name}: differs by {difference:.3e} of {scale:.3e}"
    worst = max(worst, difference)
print(f"{len(files)} outputs, largest difference {worst:.2e} of the largest element")
