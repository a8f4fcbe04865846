"""What the package offers."""

import subprocess
import sys

import serving

PUBLIC = [
    "CreateEmbeddingCache",
    "CreateParameterServer",
    "InferenceSession",
    "LookupSession",
    "ParameterServer",
    "dump_table",
    "errors",
    "load_model",
    "load_table",
    "open_snapshot",
]


def test_the_public_names_are_there():
    assert dir(serving) == serving.__all__ == PUBLIC
    assert all(hasattr(serving, name) for name in PUBLIC)
    assert not hasattr(serving, "CreateEverything")


def test_importing_serving_and_all_its_names_needs_numpy_pydantic_and_array_api_compat_only():
    code = """
import sys
before = set(sys.modules)
import serving
from kernels.host import round_rows
for name in serving.__all__:
    getattr(serving, name)
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(name for name in new - set(sys.stdlib_module_names) if not name.startswith("_sysconfigdata")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    ours = {"serving", "kernels"}
    of_pydantic = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert set(done.stdout.split()) <= ours | of_pydantic | {"numpy", "array_api_compat"}
