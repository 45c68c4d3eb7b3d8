"""Writes models in every version of MLIR bytecode and in every form of StableHLO that their text can be turned into.

usage: make_forms.py FOLDER

FOLDER holds NAME.mlir files and models.json, as make_models.py leaves them. For the names in NAMES below, FOLDER/forms gets
  NAME.bytecode-V.mlirbc    StableHLO bytecode, format version V
  NAME.portable-V.mlirbc    the portable artifact for StableHLO version V, whose operations are VHLO's
  NAME.generic.mlir         text with every operation in its general form
"""

import io
import pathlib
import sys

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

NAMES = ("mace", "0.5.2_conv_backward", "variadic_tp")


def main(folder):
    folder = pathlib.Path(folder)
    forms = folder / "forms"
    forms.mkdir(exist_ok=True)
    for name in NAMES:
        text = (folder / f"{name}.mlir").read_text(encoding="utf-8")
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            for version in range(7):
                data = io.BytesIO()
                module.operation.write_bytecode(data, desired_version=version)
                (forms / f"{name}.bytecode-{version}.mlirbc").write_bytes(data.getvalue())
            for version in (hlo.get_minimum_version(), "1.0.0", hlo.get_current_version()):
                artifact = hlo.serialize_portable_artifact_str(str(module), version)
                (forms / f"{name}.portable-{version}.mlirbc").write_bytes(artifact)
            generic = module.operation.get_asm(print_generic_op_form=True)
            (forms / f"{name}.generic.mlir").write_text(generic, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
