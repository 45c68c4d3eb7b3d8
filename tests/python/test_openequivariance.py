"""Unmodified OpenEquivariance with our module in place of its own extension, on a machine that need not have a GPU."""

import json

import pytest
from conftest import ROOT, TARGETS, VERSIONS, run


@pytest.mark.parametrize("version", VERSIONS)
def test_it_imports_and_registers_every_target_for_cuda(version):
    printed = run(
        """
        import jax, json
        registered = {}
        real = jax.ffi.register_ffi_target
        def register(name, stages, platform="cpu", **rest):
            registered[name] = [sorted(stages), platform]
            real(name, stages, platform=platform, **rest)
        jax.ffi.register_ffi_target = register
        import openequivariance as oeq
        import openequivariance.jax.extlib as extlib
        print(json.dumps([oeq.__version__, oeq.jax.__name__, registered, extlib.DeviceProp(0).multiprocessorCount]))
        """,
        version,
    )
    found, name, registered, multiprocessors = json.loads(printed)
    assert (found, name, multiprocessors) == (version, "openequivariance.jax", 132)
    assert sorted(registered) == TARGETS
    for target, (stages, platform) in registered.items():
        assert (stages, platform) == (["execute", "initialize", "instantiate"], "CUDA"), target


@pytest.mark.parametrize("version", VERSIONS)
def test_it_exports_energy_and_forces_with_its_payload_inside(version):
    printed = run(
        """
        import hashlib, json, re
        import jax, jax.export, jax.numpy as jnp, numpy as np
        import openequivariance as oeq
        from make_models import export
        from make_payloads import problem
        about = problem("uvu", channels=8, nodes=1, edges=1, out=1)
        for deterministic in (False, True):
            made = oeq.jax.TensorProductConv(about, deterministic=deterministic)
            nodes, edges = 5, 9
            shapes = [(nodes, about.irreps_in1.dim), (edges, about.irreps_in2.dim), (edges, about.weight_numel)]
            # Version 0.5.2 takes the graph as constants only.
            rows = np.sort(np.arange(edges) % nodes).astype(np.int32)
            cols = (np.arange(edges) % nodes).astype(np.int32)
            permutation = np.argsort(cols, stable=True).astype(np.int32)
            rows, cols, permutation = map(jnp.asarray, (rows, cols, permutation))
            def energy(x, y, w):
                return jnp.sum(made.forward(x, y, w, rows, cols, permutation) ** 2)
            exported = export(jax.value_and_grad(energy, (0, 1, 2)), *[(shape, np.float32) for shape in shapes])
            artifact = exported.serialize()
            again = jax.export.deserialize(artifact)
            kernel = getattr(made, "kernel", None) or made.jit_kernel
            digest = getattr(made, "hash", None)
            print(json.dumps([
                re.findall(r"stablehlo.custom_call @(\\w+)", exported.mlir_module()),
                again.platforms, artifact.find(kernel.encode()) >= 0, kernel[:1],
                digest is None or digest == int.from_bytes(hashlib.sha256(kernel.encode()).digest()[:7], "big")]))
        """,
        version,
    )
    for line in printed.splitlines():
        calls, platforms, inside, first, hashed = json.loads(line)
        assert sorted(calls) == ["conv_backward", "conv_forward"]
        assert platforms == ["cuda"]
        assert inside, "the artifact does not hold the payload as it came"
        assert hashed
        # The two attribute forms: a JSON object, and the source itself.
        assert (first == "{") == (version != "0.5.2")
    assert len(printed.splitlines()) == 2


def test_the_model_of_the_demonstration_has_the_forces_that_its_energy_has():
    """Its plain form, on the CPU: what the run on a GPU compares with is right itself."""
    printed = run(
        """
        import os, sys
        sys.path.insert(0, os.path.join(os.environ["ROOT"], "examples"))
        import jax
        jax.config.update("jax_enable_x64", True)
        import json, numpy as np, export_model as example
        options = example.Options(channels=4, atoms=20, dtype="float64")
        inputs = example.make_inputs(options)
        call = jax.jit(example.make_model(options, example.PlainConvolution))
        rest = list(inputs.values())[1:]
        energy, forces = map(np.asarray, call(*inputs.values()))
        places = [(atom, atom % 3) for atom in range(6)]
        slopes = example.differences(lambda moved: call(moved, *rest), inputs, places, 1e-4)
        turn = example.rotation(1)
        turned_energy, turned_forces = map(np.asarray, call(inputs["positions"] @ turn, *rest))
        largest = abs(forces).max()
        chosen = np.array([forces[place] for place in places])
        print(json.dumps([largest, abs(chosen - slopes).max(), abs(energy - turned_energy),
                          abs(turned_forces - forces @ turn).max(), abs(forces.sum(0)).max()]))
        """,
        ROOT=str(ROOT),
    )
    largest, against_slopes, energy_turned, forces_turned, total = json.loads(printed)
    assert largest > 1e-3, "the model hardly depends on its positions"
    assert against_slopes < 1e-6 * largest
    assert energy_turned < 1e-10
    assert forces_turned < 1e-10
    assert total < 1e-10, "forces of a cluster by itself add up to nothing"
