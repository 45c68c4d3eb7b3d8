"""Exports a MACE-like interatomic potential with OpenEquivariance convolutions, for CUDA, on any machine.

The model maps positions of atoms to an energy and forces. It has as many OpenEquivariance convolutions as LAYERS below,
each with a kernel of its own; forces come from jax's reverse mode, so every convolution is called forward and backward.
Weights are random: what is shown is the machinery, not chemistry.

What is written to FOLDER:
  model.jaxexport   the artifact of jax.export
  model.mlirbc      with --bytecode: its StableHLO bytecode alone
  model.mlir        with --text: its StableHLO text
  inputs/NAME.npy   one file for each input
  manifest.json     inputs and outputs in order, sizes, and the model's options

With --run, on a machine with a GPU, the artifact is run by jax, and energy and forces are checked: against the same
model in plain jax.numpy, against central differences of the energy, and under a rotation.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
import time

os.environ["OEQ_NOTORCH"] = "1"

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import openequivariance as oeq
import openequivariance_extjax
from openequivariance.core.e3nn_lite import Irreps, TPProblem, wigner_3j

SPECIES = 4
SPACING = 2.0  # angstrom between neighbouring sites of the jittered grid
CUTOFF = 4.2  # angstrom
HIGHEST = 3  # l of the finest spherical harmonics
RADIAL = 8  # radial basis functions
HIDDEN = 64  # width of the radial network

# For each layer the highest l of its node features, of the spherical harmonics that it looks at, and of what it makes.
LAYERS = ((0, 3, 1), (1, 3, 2), (2, 2, 2), (2, 3, 2), (2, 3, 1), (1, 3, 1), (1, 2, 1), (1, 3, 0))


@dataclasses.dataclass(frozen=True)
class Options:
    """What tells one exported model from another."""

    channels: int = 64
    atoms: int = 128
    layers: int = len(LAYERS)
    dtype: str = "float32"
    deterministic: bool = False
    seed: int = 0


def irreps(channels, highest):
    return Irreps("+".join(f"{channels}x{l}{'eo'[l % 2]}" for l in range(highest + 1)))


def problem(options, layer):
    """The channel-wise tensor product of one layer: all paths of natural parity, by the l that they make."""
    nodes, edges, made = LAYERS[layer]
    first, second = irreps(options.channels, nodes), irreps(1, edges)
    paths = sorted(
        (c.l, i, j)
        for i, (_, a) in enumerate(first)
        for j, (_, b) in enumerate(second)
        for c in a * b
        if c.l <= made and c.p == (-1) ** c.l
    )
    dtype = np.dtype(options.dtype).type
    return TPProblem(
        first,
        second,
        Irreps([(options.channels, (l, (-1) ** l)) for l, _, _ in paths]),
        [(i, j, k, "uvu", True) for k, (_, i, j) in enumerate(paths)],
        shared_weights=False,
        internal_weights=False,
        irrep_dtype=dtype,
        weight_dtype=dtype,
    )


class NativeConvolution:
    """A convolution by OpenEquivariance's kernels."""

    def __init__(self, description, deterministic):
        self.kernel = oeq.jax.TensorProductConv(description, deterministic=deterministic)

    def arrange(self, weights):
        """Columns of the radial network's last layer, in the order in which the kernel wants its weights."""
        return np.asarray(self.kernel.reorder_weights_from_e3nn(weights, has_batch_dim=True))

    def __call__(self, nodes, edges, weights, graph):
        return self.kernel(nodes, edges, weights, graph["receivers"], graph["senders"], graph.get("sender_permutation"))


class PlainConvolution:
    """The same convolution written out in jax.numpy: what the kernels are checked against."""

    def __init__(self, description, _deterministic=False):
        self.description = description

    def arrange(self, weights):
        return weights

    def __call__(self, nodes, edges, weights, graph):
        about = self.description
        firsts, seconds, messages, start = about.irreps_in1.slices(), about.irreps_in2.slices(), [], 0
        sent = nodes[graph["senders"]]
        for path in about.instructions:
            channels, a = about.irreps_in1[path.i_in1]
            _, b = about.irreps_in2[path.i_in2]
            _, c = about.irreps_out[path.i_out]
            coupling = jnp.asarray(path.path_weight * wigner_3j(a.l, b.l, c.l), nodes.dtype)
            x = sent[:, firsts[path.i_in1]].reshape(-1, channels, a.dim)
            message = jnp.einsum("eui,ej,eu,ijk->euk", x, edges[:, seconds[path.i_in2]],
                                 weights[:, start : start + channels], coupling)  # fmt: skip
            messages.append(message.reshape(message.shape[0], -1))
            start += channels
        message = jnp.concatenate(messages, axis=1)
        return jnp.zeros((nodes.shape[0], message.shape[1]), nodes.dtype).at[graph["receivers"]].add(message)


def coupling_to_next(l):
    """What turns harmonics of order 1 and l into the 2l + 3 of order l + 1, whose squares add to 2l + 3."""
    direction = np.array([0.36, 0.48, 0.8])
    below = np.ones(1)
    for order in range(l + 1):
        coupling = wigner_3j(1, order, order + 1)
        above = np.einsum("i,j,ijk->k", direction, below, coupling)
        scale = math.sqrt(2 * order + 3) / np.linalg.norm(above)
        below = scale * above
    return scale * coupling


def spherical_harmonics(directions):
    """Real spherical harmonics of unit vectors up to HIGHEST, in the basis of the kernels: [e, (HIGHEST + 1)^2]."""
    orders = [jnp.ones_like(directions[:, :1])]
    for l in range(HIGHEST):
        orders.append(
            jnp.einsum("ei,ej,ijk->ek", directions, orders[-1], jnp.asarray(coupling_to_next(l), directions.dtype))
        )
    return jnp.concatenate(orders, axis=1)


def make_parameters(options):
    """Random weights of every layer, in double precision, so that a model in any precision is the same model."""
    rng = np.random.default_rng(options.seed)

    def matrix(rows, columns):
        return rng.standard_normal((rows, columns)) / math.sqrt(rows)

    channels, layers = options.channels, []
    for layer in range(options.layers):
        about = problem(options, layer)
        nodes, _, made = LAYERS[layer]
        widths = [sum(mul for mul, ir in about.irreps_out if ir.l == l) for l in range(made + 1)]
        layers.append({
            "up": [matrix(channels, channels) for _ in range(nodes + 1)],
            "radial": [matrix(RADIAL, HIDDEN), matrix(HIDDEN, HIDDEN), matrix(HIDDEN, about.weight_numel)],
            "down": [matrix(width, channels) for width in widths],
            "gates": [matrix(widths[0], channels) for _ in range(made)],
            "skip": [matrix(channels, channels) for _ in range(min(nodes, made) + 1)],
            "self": rng.standard_normal((SPECIES, channels)),
            "readout": [matrix(channels, 16), matrix(16, 1)],
        })  # fmt: skip
    return {
        "embedding": rng.standard_normal((SPECIES, channels)),
        "reference": rng.standard_normal(SPECIES),
        "layers": layers,
    }


def make_model(options, convolution=NativeConvolution):
    """The function from inputs to energy and forces."""
    dtype = np.dtype(options.dtype)
    parameters = make_parameters(options)
    convolutions = [convolution(problem(options, layer), options.deterministic) for layer in range(options.layers)]
    for made, layer in zip(convolutions, parameters["layers"]):
        layer["radial"][-1] = made.arrange(layer["radial"][-1].astype(dtype))
    parameters = jax.tree.map(lambda array: jnp.asarray(array, dtype), parameters)

    def energy(positions, species, graph):
        receivers, senders = graph["receivers"], graph["senders"]
        vectors = positions[receivers] - positions[senders]
        lengths = jnp.sqrt(jnp.sum(vectors * vectors, axis=1, keepdims=True))
        harmonics = spherical_harmonics(vectors / lengths)
        scaled = lengths / CUTOFF
        # Falls to zero at the cutoff with its first two derivatives, so that the energy is smooth.
        envelope = jnp.where(scaled < 1, 1 - 10 * scaled**3 + 15 * scaled**4 - 6 * scaled**5, 0)
        waves = jnp.sin(jnp.arange(1, RADIAL + 1, dtype=dtype) * np.pi * scaled) / lengths * envelope
        neighbours = math.sqrt(receivers.shape[0] / positions.shape[0])

        features = [parameters["embedding"][species][:, :, None]]
        atoms = parameters["reference"][species]
        for index, (made, layer) in enumerate(zip(convolutions, parameters["layers"])):
            _, edges, highest = LAYERS[index]
            sent = [jnp.einsum("nci,cd->ndi", part, weights) for part, weights in zip(features, layer["up"])]
            sent = jnp.concatenate([part.reshape(part.shape[0], -1) for part in sent], axis=1)
            first, second, last = layer["radial"]
            weights = jax.nn.silu(jax.nn.silu(waves @ first) @ second) @ last
            received = made(sent, harmonics[:, : (edges + 1) ** 2], weights, graph) / neighbours

            # Everything of one l lies together, whatever path made it.
            mixed, start = [], 0
            for l, down in enumerate(layer["down"]):
                width = down.shape[0] * (2 * l + 1)
                mixed.append(received[:, start : start + width].reshape(-1, down.shape[0], 2 * l + 1))
                start += width
            scalars = mixed[0][:, :, 0]
            gates = [jax.nn.sigmoid(scalars @ gate)[:, :, None] for gate in layer["gates"]]
            made_features = [jnp.einsum("nci,cd->ndi", part, down) for part, down in zip(mixed, layer["down"])]
            made_features = [jax.nn.silu(made_features[0])] + [p * g for p, g in zip(made_features[1:], gates)]
            for l, skip in enumerate(layer["skip"]):
                made_features[l] = made_features[l] + jnp.einsum("nci,cd->ndi", features[l], skip)
            made_features[0] = made_features[0] + layer["self"][species][:, :, None]
            features = [part / math.sqrt(3) for part in made_features]
            inner, outer = layer["readout"]
            atoms = atoms + (jnp.tanh(features[0][:, :, 0] @ inner) @ outer)[:, 0]
        return jnp.sum(atoms)

    def energy_and_forces(positions, species, receivers, senders, *sender_permutation):
        graph = {"receivers": receivers, "senders": senders}
        if sender_permutation:
            graph["sender_permutation"] = sender_permutation[0]
        # GPUs would round float32 factors of matrix products to 10 bits otherwise, which forces should not bear.
        with jax.default_matmul_precision("highest"):
            value, gradient = jax.value_and_grad(energy)(positions, species, graph)
        return value, -gradient

    return energy_and_forces


def make_inputs(options):
    """A cluster of atoms: a jittered grid, its pairs within CUTOFF sorted by receiver."""
    rng = np.random.default_rng(options.seed + 1)
    side = math.ceil(options.atoms ** (1 / 3))
    grid = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3)[: options.atoms]
    positions = SPACING * grid + rng.uniform(-0.3, 0.3, grid.shape)
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    receivers, senders = np.nonzero((distances < CUTOFF) & ~np.eye(options.atoms, dtype=bool))
    inputs = {
        "positions": positions.astype(options.dtype),
        "species": rng.integers(0, SPECIES, options.atoms).astype(np.int32),
        "receivers": receivers.astype(np.int32),
        "senders": senders.astype(np.int32),
    }
    if options.deterministic:
        # The edges in the order of their senders.
        inputs["sender_permutation"] = np.lexsort((receivers, senders)).astype(np.int32)
    return inputs


def export(options):
    """The model exported for CUDA, and its inputs."""
    inputs = make_inputs(options)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in inputs.values()]
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in openequivariance_extjax.registrations()]
    exported = jax.export.export(jax.jit(make_model(options)), platforms=["cuda"], disabled_checks=checks)(*shapes)
    return exported, inputs


def write(folder, options, exported, inputs, bytecode, text):
    """Writes the files that this module's documentation lists, and returns the manifest."""
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    (folder / "model.jaxexport").write_bytes(exported.serialize())
    if bytecode:
        (folder / "model.mlirbc").write_bytes(exported.mlir_module_serialized)
    if text:
        (folder / "model.mlir").write_text(exported.mlir_module(), encoding="utf-8")
    for name, array in inputs.items():
        np.save(folder / "inputs" / f"{name}.npy", array)
    manifest = {
        "options": dataclasses.asdict(options),
        "convolutions": options.layers,
        "edges": len(inputs["receivers"]),
        "inputs": [{"name": n, "dtype": str(a.dtype), "shape": list(a.shape)} for n, a in inputs.items()],
        "outputs": [
            {"name": name, "dtype": str(aval.dtype), "shape": list(aval.shape)}
            for name, aval in zip(("energy", "forces"), exported.out_avals)
        ],
        "jax": jax.__version__,
        "openequivariance": oeq.__version__,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest


def rotation(seed):
    """A rotation of space."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))
    q = q * np.sign(np.diag(r))
    return q * np.linalg.det(q)


def differences(call, inputs, coordinates, step):
    """Forces on some coordinates, as (atom, axis), by central differences of the energy."""
    forces = []
    for atom, axis in coordinates:
        energies = []
        for sign in (1, -1):
            moved = inputs["positions"].copy()
            moved[atom, axis] += sign * step
            energies.append(float(call(moved)[0]))
        forces.append((energies[1] - energies[0]) / (2 * step))
    return np.array(forces)


def check(name, error, tolerance):
    """Prints one line of the table; whether it passed."""
    passed = bool(error <= tolerance)
    print(f"  {name:<58} {error:>10.2e} {tolerance:>10.0e}  {'ok' if passed else 'FAILED'}")
    return passed


def run(folder, options):
    """Runs the artifact in `folder` on the GPU and checks it; whether everything passed."""
    jax.config.update("jax_enable_x64", True)
    exported = jax.export.deserialize(bytearray((folder / "model.jaxexport").read_bytes()))
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    inputs = {entry["name"]: np.load(folder / "inputs" / f"{entry['name']}.npy") for entry in manifest["inputs"]}
    began = time.perf_counter()
    call = jax.jit(exported.call)
    energy, forces = jax.block_until_ready(call(*inputs.values()))
    cold = time.perf_counter() - began
    times = []
    for _ in range(20):
        began = time.perf_counter()
        jax.block_until_ready(call(*inputs.values()))
        times.append(time.perf_counter() - began)
    print(f"{jax.devices()[0].device_kind}: first call {cold:.2f} s, then {1e3 * min(times):.2f} ms; "
          f"{options.atoms} atoms, {manifest['edges']} edges, energy {float(energy):.6f}")  # fmt: skip

    # Finite differences need double precision: the same model again, in it.
    precise = dataclasses.replace(options, dtype="float64")
    exported, fine = export(precise)
    fine["positions"] = inputs["positions"].astype(np.float64)
    native = jax.jit(exported.call)
    rest = list(fine.values())[1:]
    fine_energy, fine_forces = map(np.asarray, native(fine["positions"], *rest))
    plain_energy, plain_forces = map(
        np.asarray, jax.jit(make_model(precise, PlainConvolution))(*list(fine.values())[:4])
    )
    largest = np.abs(fine_forces).max()
    rng = np.random.default_rng(options.seed + 2)
    coordinates = [(int(atom), int(rng.integers(3))) for atom in rng.choice(options.atoms, 12, replace=False)]
    slopes = differences(lambda moved: native(moved, *rest), fine, coordinates, 1e-4)
    turn = rotation(options.seed + 3)
    turned_energy, turned_forces = map(np.asarray, native(fine["positions"] @ turn, *rest))

    print(f"  {'relative to the largest force component, ' + format(largest, '.3f'):<58} {'error':>10} {'allowed':>10}")
    chosen = np.array([fine_forces[place] for place in coordinates])
    loose = 1e-3 if options.dtype == "float32" else 1e-9
    passed = [
        check("artifact: energy, against double precision", abs(float(energy) - fine_energy) / abs(fine_energy), loose),
        check("artifact: forces, against double precision", np.abs(forces - fine_forces).max() / largest, loose),
        check("double precision: energy, against plain jax", abs(fine_energy - plain_energy) / abs(plain_energy), 1e-9),
        check("double precision: forces, against plain jax", np.abs(fine_forces - plain_forces).max() / largest, 1e-9),
        check(
            f"double precision: {len(slopes)} forces, against central differences",
            np.abs(chosen - slopes).max() / largest,
            1e-6,
        ),
        check(
            "double precision: energy of the rotated cluster", abs(turned_energy - fine_energy) / abs(fine_energy), 1e-9
        ),
        check(
            "double precision: forces of the rotated cluster",
            np.abs(turned_forces - fine_forces @ turn).max() / largest,
            1e-9,
        ),
    ]
    print(f"  {'atom':>6} {'axis':>4} {'force':>16} {'central difference':>20}")
    for (atom, axis), force, slope in zip(coordinates, chosen, slopes):
        print(f"  {atom:>6} {'xyz'[axis]:>4} {force:>16.9f} {slope:>20.9f}")
    return all(passed)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--channels", type=int, default=Options.channels)
    parser.add_argument("--atoms", type=int, default=Options.atoms)
    parser.add_argument("--layers", type=int, default=Options.layers, choices=range(1, len(LAYERS) + 1), metavar="1..8")
    parser.add_argument("--dtype", default=Options.dtype, choices=("float32", "float64"))
    parser.add_argument("--deterministic", action="store_true", help="sum messages in a fixed order")
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--bytecode", action="store_true", help="write model.mlirbc too")
    parser.add_argument("--text", action="store_true", help="write model.mlir too")
    parser.add_argument("--run", action="store_true", help="run the artifact on this machine's GPU and check it")
    arguments = vars(parser.parse_args())
    folder, bytecode, text, wants_run = (arguments.pop(name) for name in ("folder", "bytecode", "text", "run"))
    options = Options(**arguments)
    if options.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    manifest = write(folder, options, *export(options), bytecode, text)
    print(f"wrote {folder}: {manifest['convolutions']} convolutions, {options.atoms} atoms, {manifest['edges']} edges, "
          f"{(folder / 'model.jaxexport').stat().st_size / 1e6:.1f} MB")  # fmt: skip
    if wants_run and not run(folder, options):
        sys.exit("the model's energy or forces are wrong: see the table")


if __name__ == "__main__":
    main()
