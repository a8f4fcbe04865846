"""Run kernels that tests of the runner write inline."""

import pytest


@pytest.fixture
def run(runner, tmp_path):
    """Compile ``code`` as the body of a kernel of ``parameters``, launch it and wait."""

    def run(code, parameters="int* out", args=(), grid=(1,), block=(32,), shared_bytes=0):
        file = tmp_path / "kernel.cu"
        file.write_text(f'extern "C" __global__ void kernel({parameters}) {{\n{code}\n}}\n')
        stream = runner.stream()
        runner.kernel(file, "kernel")(grid, block, args, stream, shared_bytes)
        stream.synchronize()

    return run
