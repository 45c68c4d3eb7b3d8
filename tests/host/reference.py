"""What the targets must compute, in double precision and straight from the definition, and the problems to try it on.

A tensor product is a sum over its instructions. One takes irreps number i of the first operand and j of the second, and
gives irreps number k, by way of the Clebsch-Gordan coefficients C of their degrees and the path's weight p:

    uvu:  L3[u, c] += p sum C[a, b, c] L1[u, a] L2[v, b] W[u, v]
    uvw:  L3[w, c] += p sum C[a, b, c] L1[u, a] L2[v, b] W[u, v, w]

That is linear in each of L1, L2 and W, which gives all derivatives. Only the problem's description comes from
OpenEquivariance: irreps, instructions with their normalised path weights, coefficients, and the order in which its kernels
want the weights.
"""

import itertools
import os

os.environ["OEQ_NOTORCH"] = "1"

import numpy as np
from openequivariance.core.e3nn_lite import Irreps, TPProblem, wigner_3j
from openequivariance.core.LoopUnrollConv import LoopUnrollConv
from openequivariance.core.LoopUnrollTP import LoopUnrollTP


class Device:
    """What the generator asks of a device: how many blocks and warps a launch has, and how a problem is cut for them."""

    warpsize = 32

    def __init__(self, processors, shared):
        self.multiprocessorCount, self.maxSharedMemPerBlock = processors, shared


H200 = Device(132, 232448)
# Few warps, so that each gets several items; little shared memory, so that kernels work in several passes.
SMALL = Device(2, 49152)


def irreps(channels, highest):
    return Irreps("+".join(f"{channels}x{l}{'eo'[l % 2]}" for l in range(highest + 1)))


def problem(mode, mul, top, dtype=np.float32, shared=False, layout="mul_ir"):
    """All paths between irreps up to the degrees `top` of operands and result, with multiplicities `mul`."""
    first, second = irreps(mul[0], top[0]), irreps(mul[1], top[1])
    result, paths = [], []
    if mode == "uvw":
        result = irreps(mul[2], top[2])
        for (i, (_, a)), (j, (_, b)), (k, (_, c)) in itertools.product(*map(enumerate, (first, second, result))):
            if any(c == each for each in a * b):
                paths.append((i, j, k, "uvw", True))
    else:
        for (i, (m, a)), (j, (_, b)) in itertools.product(enumerate(first), enumerate(second)):
            for c in a * b:
                if c.l <= top[2]:
                    paths.append((i, j, len(result), "uvu", True))
                    result.append((m, c))
        result = Irreps(result)
    return TPProblem(first, second, result, paths, shared_weights=shared, internal_weights=False, irrep_dtype=dtype,
                     weight_dtype=dtype, layout=layout)  # fmt: skip


def weight_order(made):
    """For each weight of the kernel, its place in the order of the problem's instructions."""
    count = made.config.weight_numel
    order, source = np.full(count, -1), np.arange(count)
    for spec in made.forward_schedule.weight_reordering_info(source, False):
        part = source[spec["parent_range"]].reshape(spec["parent_shape"])[spec["weights_subrange"]]
        order[spec["child_range"]] = part.transpose(spec["transpose_perm"]).reshape(-1)
    assert sorted(order) == list(range(count))
    return order


class Reference:
    """A problem's products and derivatives for a batch of rows. Weights are in the kernel's order."""

    def __init__(self, made):
        self.problem, self.order = made.config, weight_order(made)

    def paths(self):
        """For each instruction: the three slices, their shapes, the weights' places and shape, and coefficients."""
        p = self.problem
        at = 0
        inverse = np.argsort(self.order)
        for ins in p.instructions:
            sides = [(irs[n], irs.slices()[n]) for irs, n in
                     ((p.irreps_in1, ins.i_in1), (p.irreps_in2, ins.i_in2), (p.irreps_out, ins.i_out))]  # fmt: skip
            size = int(np.prod(ins.path_shape))
            c = wigner_3j(*(each.ir.l for each, _ in sides)) * ins.path_weight
            yield ins.connection_mode, sides, inverse[at : at + size], tuple(ins.path_shape), c
            at += size

    def part(self, array, side):
        """Some irreps of all rows as [row, multiplicity, component]."""
        (mul, ir), where = side
        block = array[:, where]
        if self.problem.layout == "ir_mul":
            return block.reshape(len(block), ir.dim, mul).swapaxes(1, 2)
        return block.reshape(len(block), mul, ir.dim)

    def put(self, array, side, value):
        where = side[1]
        if self.problem.layout == "ir_mul":
            value = value.swapaxes(1, 2)
        array[:, where] += value.reshape(len(array), -1)

    def contract(self, wanted, x=None, y=None, w=None, g=None):
        """The sum with one of its four factors left open: what stands there is the answer."""
        rows = max(len(a) for a in (x, y, w, g) if a is not None)
        p = self.problem
        sizes = {"x": p.irreps_in1.dim, "y": p.irreps_in2.dim, "w": p.weight_numel, "g": p.irreps_out.dim}
        out = np.zeros((rows, sizes[wanted]))
        for mode, (a, b, c), places, shape, coefficients in self.paths():
            index = {"x": "nua", "y": "nvb", "w": "nuv" if mode == "uvu" else "nuvw", "g": "nuc" if mode == "uvu" else "nwc"}
            values = {"x": x if x is None else self.part(x, a), "y": y if y is None else self.part(y, b),
                      "g": g if g is None else self.part(g, c),
                      "w": w if w is None else np.broadcast_to(w[:, places], (rows, len(places))).reshape(rows, *shape)}  # fmt: skip
            given = [k for k in "xywg" if k != wanted]
            subscripts = ",".join(index[k] for k in given) + ",abc->" + index[wanted]
            value = np.einsum(subscripts, *(values[k] for k in given), coefficients, optimize=True)
            if wanted == "w":
                out[:, places] += value.reshape(rows, -1)
            else:
                self.put(out, {"x": a, "y": b, "g": c}[wanted], value)
        return out

    def derivatives(self, order, x, y, w, g=None, dx=None, dy=None, dw=None):
        """The results of the target of that order, by name, for a batch."""
        c = self.contract
        if order == 0:
            return {"L3": c("g", x=x, y=y, w=w)}
        if order == 1:
            return {"L1": c("x", y=y, w=w, g=g), "L2": c("y", x=x, w=w, g=g), "W": c("w", x=x, y=y, g=g)}
        return {
            "L1": c("x", y=dy, w=w, g=g) + c("x", y=y, w=dw, g=g),
            "L2": c("y", x=dx, w=w, g=g) + c("y", x=x, w=dw, g=g),
            "W": c("w", x=dx, y=y, g=g) + c("w", x=x, y=dy, g=g),
            "L3": c("g", x=dx, y=y, w=w) + c("g", x=x, y=dy, w=w) + c("g", x=x, y=y, w=dw),
        }


class Case:
    """A problem with its kernel: operands for a target, and what the target must answer."""

    def __init__(self, name, family, device=H200, index=np.int32, variant="", **description):
        self.name, self.family, self.variant, self.index = name, family, variant, index
        self.problem = problem(**description)
        if family == "tp":
            self.made = LoopUnrollTP(self.problem, device, False, torch_op=False)
        else:
            self.made = LoopUnrollConv(self.problem, device, False, idx_dtype=index, torch_op=False,
                                       deterministic=variant != "", kahan=variant == "kahan")  # fmt: skip
        self.payload, self.hash = self.made.kernel_string, self.made.hash
        self.reference = Reference(self.made)
        self.dtype = self.problem.irrep_dtype
        self.properties = self.made.kernel_prop

    def graph(self, nodes, edges, random):
        """Edges sorted by row, with nodes that have none. Deterministic kernels want the graph symmetric."""
        if self.variant == "":
            pairs = random.integers(0, [nodes - 2, nodes], (edges, 2))
        else:
            some = random.integers(0, nodes - 2, (edges // 2, 2))
            some = some[some[:, 0] != some[:, 1]]
            pairs = np.unique(np.concatenate([some, some[:, ::-1]]), axis=0)
        pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
        permutation = np.lexsort((pairs[:, 0], pairs[:, 1]))
        return pairs[:, 0], pairs[:, 1], permutation

    def inputs(self, batch=70, nodes=20, edges=130, seed=1):
        """Random operands of all orders, by name; rounded to the case's precision."""
        random = np.random.default_rng(seed)
        p = self.properties
        if self.family == "tp":
            n = e = batch
            graph = None
        else:
            graph = self.graph(nodes, edges, random)
            n, e = nodes, len(graph[0])
        weights = 1 if p["shared_weights"] else e
        shapes = {"x": (n, p["L1_dim"]), "y": (e, p["L2_dim"]), "w": (weights, p["weight_numel"]), "g": (n, p["L3_dim"])}
        shapes |= {"d" + name: shapes[name] for name in "xyw"}
        return {name: random.standard_normal(shape).astype(self.dtype) for name, shape in shapes.items()}, graph

    def operands(self, order, inputs, graph):
        """What the target of that order takes, and the shapes of its results by name."""
        flat = {k: v[0] if k.endswith("w") and self.properties["shared_weights"] else v for k, v in inputs.items()}
        names = (("x", "y", "w"), ("x", "y", "w", "g"), ("x", "y", "w", "g", "dx", "dy", "dw"))[order]
        operands = [flat[name] for name in names]
        if graph is not None:
            rows, cols, permutation = (np.ascontiguousarray(each, self.index) for each in graph)
            operands += [rows, cols, np.full(self.properties["workspace_size"], 0xA5, np.uint8),
                         permutation if self.variant else np.zeros(1, self.index)]  # fmt: skip
        shape = {"L1": flat["x"].shape, "L2": flat["y"].shape, "W": flat["w"].shape, "L3": flat["g"].shape}
        return operands, {name: shape[name] for name in (("L3",), ("L1", "L2", "W"), ("L1", "L2", "W", "L3"))[order]}

    def expected(self, order, inputs, graph):
        """The results by name, in double precision."""
        v = {name: value.astype(np.float64) for name, value in inputs.items()}
        rows = cols = None
        if graph is not None:
            rows, cols, _ = graph
            v |= {"x": v["x"][cols], "dx": v["dx"][cols], "g": v["g"][rows]}
        names = (("x", "y", "w"), ("x", "y", "w", "g"), ("x", "y", "w", "g", "dx", "dy", "dw"))[order]
        result = self.reference.derivatives(order, **{name: v[name] for name in names})
        if graph is not None:
            for name, where in (("L1", cols), ("L3", rows)):
                if name in result:
                    summed = np.zeros((len(inputs["x"]), result[name].shape[1]))
                    np.add.at(summed, where, result[name])
                    result[name] = summed
        if self.properties["shared_weights"] and "W" in result:
            result["W"] = result["W"].sum(axis=0)
        return result

    def parts(self, name):
        """The columns of a result that are judged by themselves: an instruction's weights, or one irreps."""
        p = self.problem
        if name == "W":
            return [places for _, _, places, _, _ in self.reference.paths()]
        return {"L1": p.irreps_in1, "L2": p.irreps_in2, "L3": p.irreps_out}[name].slices()

    def error(self, name, got, expected):
        """The largest error of a result relative to the largest value in the same part of it."""
        worst = 0.0
        for part in self.parts(name):
            scale = np.abs(expected[..., part]).max()
            difference = np.abs(got[..., part].astype(np.float64) - expected[..., part]).max()
            worst = max(worst, difference / scale if scale > 0 else difference)
            if np.isnan(difference):
                return np.inf
        return worst


def cases():
    """Descriptions by name: both families, modes and layouts, all variants, precisions and kinds of weights."""
    f32, f64 = np.float32, np.float64
    table = {}

    def add(name, **description):
        assert name not in table
        table[name] = description

    uvu = {
        "one": ((1, 1, 0), (0, 0, 0)),
        "narrow": ((5, 1, 0), (1, 1, 2)),
        "warp": ((32, 1, 0), (1, 2, 2)),
        "wide": ((40, 1, 0), (1, 1, 1)),
        "several": ((8, 3, 0), (1, 1, 1)),
        "high": ((4, 1, 0), (2, 3, 3)),
    }
    uvw = {
        "narrow": ((3, 1, 5), (1, 1, 1)),
        "warp": ((16, 1, 16), (1, 1, 1)),
        "wide": ((8, 1, 40), (1, 0, 1)),
        "several": ((4, 2, 6), (1, 1, 1)),
        "high": ((2, 1, 3), (2, 2, 2)),
    }
    for dtype in (f32, f64):
        kind = np.dtype(dtype).name.replace("loat", "")
        for device, suffix in ((H200, ""), (SMALL, "_small")):
            for mode, sizes in (("uvu", uvu), ("uvw", uvw)):
                for size, (mul, top) in sizes.items():
                    # Every size of every mode, on one device in one precision and on the other in the other.
                    if (list(sizes).index(size) % 2 == 0) == ((device is H200) == (dtype is f32)):
                        common = dict(mode=mode, mul=mul, top=top, dtype=dtype, device=device)
                        add(f"tp_{mode}_{size}_{kind}{suffix}", family="tp", **common)
                        add(f"conv_{mode}_{size}_{kind}{suffix}", family="conv", **common)
                        if size not in ("one", "wide"):
                            add(f"conv_det_{mode}_{size}_{kind}{suffix}", family="conv", variant="deterministic", **common)
        for mode, mul, top in (("uvu", (16, 1, 0), (1, 1, 2)), ("uvw", (6, 1, 7), (1, 1, 1))):
            for family in ("tp", "conv"):
                add(f"{family}_{mode}_shared_{kind}", family=family, mode=mode, mul=mul, top=top, dtype=dtype, shared=True,
                    device=SMALL)  # fmt: skip
        for family, variant in (("tp", ""), ("conv", ""), ("conv", "deterministic")):
            add(f"{family}_irmul{variant and '_det'}_{kind}", family=family, variant=variant, mode="uvu", mul=(12, 2, 0),
                top=(2, 1, 2), dtype=dtype, layout="ir_mul", device=SMALL)  # fmt: skip
    for mode, mul, top in (("uvu", (32, 1, 0), (1, 1, 2)), ("uvw", (6, 1, 7), (1, 1, 1)), ("uvu", (40, 2, 0), (1, 1, 1))):
        for device, suffix in ((H200, ""), (SMALL, "_small")):
            add(f"conv_kahan_{mode}_{mul[0]}{suffix}", family="conv", variant="kahan", mode=mode, mul=mul, top=top, device=device)
    add("conv_i64", family="conv", mode="uvu", mul=(8, 1, 0), top=(1, 1, 1), index=np.int64)
    add("conv_det_i64", family="conv", variant="deterministic", mode="uvu", mul=(8, 1, 0), top=(1, 1, 1), index=np.int64)
    return table
