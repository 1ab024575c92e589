"""Triton's entry point of an EngineBay model. Beside this file: lib/ the code, engine/ the model."""

import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

# Not resolved: `enginebay serve` links to the repository because the interpreter inside Triton knows no
# characters but ASCII in paths.
_FOLDER = Path(__file__).absolute().parent
sys.path.insert(0, str(_FOLDER / "lib"))  # before any EngineBay that may be installed


class TritonPythonModel:
    """Decoupled: `execute` returns at once, responses follow through each request's sender."""

    def initialize(self, args: dict[str, str]) -> None:
        try:
            str(_FOLDER).encode()
        except UnicodeEncodeError:
            raise RuntimeError(
                f"{str(_FOLDER)!a}: Triton's Python worker knows no characters but ASCII in paths; move "
                "the model repository, or serve it with 'enginebay serve'"
            ) from None
        # Not above: Triton first imports this file just to ask whether it completes the configuration.
        from enginebay.triton_repo.backend.service import Service

        self._service = Service(
            pb_utils, _FOLDER, args["model_config"], args["model_name"], args["model_version"]
        )

    def execute(self, requests: list[Any]) -> None:
        self._service.accept(requests)

    def finalize(self) -> None:
        self._service.close()
