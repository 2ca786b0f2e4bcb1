"""Predictions of one client's model for new rows, which go the way that the training rows went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from feddbe.data import rows
from feddbe.errors import BadInput, one_line
from feddbe.export.deployed import take
from feddbe.models import ModelSource
from feddbe.options.permission import permit
from feddbe.paths import expand

__all__ = ["predict"]

_BATCH = 256


def predict(
    run: str | Path,
    client: int | str,
    data: str | Path,
    *,
    round: str = "best",
    trained_on: Any = None,
    model: ModelSource | None = None,
    code: Sequence[str | Path] = (),
    trust: bool = False,
) -> dict[str, Any]:
    """What this client's model says of the rows in a file: `labels`, their names, and for each row `label`
    and `probabilities`. `trained_on` and `model`: the run's, if they were given as Python objects. Code in
    files is executed only if `code` names the files or `trust` says that the run is your own, and if its
    content is the same."""
    taken = take(run, client, round, trained_on, model, permit(code, trust=trust))
    path = expand(data)
    try:
        x = torch.from_numpy(rows.read(taken.preprocessing.to_json(), path))
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror or one_line(error)}") from None
    except ValueError as error:
        raise BadInput(one_line(error)) from None
    with torch.inference_mode():
        p = torch.cat([taken.module(some).softmax(dim=1) for some in torch.split(x, _BATCH)])
    labels = taken.about["labels"]
    found = [
        {"label": labels[int(row.argmax())], "probabilities": [float(value) for value in row]} for row in p
    ]
    return {**taken.about, "rows": found}
