from pathlib import Path

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHpctrain(PythonPackage):
    """One training script or published recipe, from a laptop to a Slurm and InfiniBand cluster."""

    # There is no public download: `python -m build` writes the archive, and Spack looks for it where it is called.
    homepage = "URL-OF-THIS-REPOSITORY"
    url = f"file://{Path.cwd()}/hpctrain-0.2.0.tar.gz"
    manual_download = True

    license("Apache-2.0")

    # A release adds sha256; until then: spack install --no-checksum
    version("0.2.0")

    variant("train", default=True, description="What ranks need beside a framework")
    variant("torch", default=False, description="Train in PyTorch")

    conflicts("+torch", when="~train", msg="PyTorch's ranks need +train")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.25:", type="build")

    with default_args(type=("build", "run")):
        depends_on("py-annotated-types@0.6:")
        depends_on("py-clustershell@1.9:")
        depends_on("py-jinja2@3.1:")
        depends_on("py-markupsafe@2.1:")
        depends_on("py-numpy@1.26:")
        depends_on("py-nvidia-ml-py@12.535:")
        depends_on("py-psutil@5.9:")
        depends_on("py-pydantic@2.9:")
        depends_on("py-pyyaml@6.0:")
        depends_on("py-rich@13.7:")
        depends_on("py-safetensors@0.4:")
        depends_on("py-typer@0.15:")
        depends_on("py-xxhash@3.4:")

    with default_args(type=("build", "run"), when="+train"):
        depends_on("py-ml-dtypes@0.4:")
        depends_on("py-mpi4py@4.0:")
        depends_on("py-scikit-learn@1.4:")
        depends_on("py-tensorboard@2.16:")

    depends_on("py-torch@2.8:2.13", when="+torch", type=("build", "run"))
