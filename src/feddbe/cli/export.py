"""`feddbe export` and `feddbe predict`: the model of one client."""

from __future__ import annotations

from pathlib import Path

import click

from feddbe.cli.base import (
    AS_JSON,
    CODE,
    ROUND,
    TRUST,
    Argument,
    Command,
    print_json,
    print_note,
    print_text,
)
from feddbe.errors import truncate


@click.command("export", cls=Command)
@click.argument("run", cls=Argument, help="folder of a run, or its name in runs/")
@click.option("--client", required=True, metavar="NAME|N", help="name or number of the client")
@ROUND
@click.option("-o", "--out", metavar="DIR", type=Path, help="output folder [default: RUN-client-NAME]")
@click.option("--onnx", is_flag=True, help="write ONNX too (pip install 'feddbe[onnx]')")
@CODE
@TRUST
@AS_JSON
def export(
    run: str,
    client: str,
    round_: str,
    out: Path | None,
    onnx: bool,
    code: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Export a client's model: weights, program, preprocessing and a script that scores new rows."""
    import json

    from feddbe.export import export_model

    folder = export_model(run, client, round=round_, out=out, onnx=onnx, code=code, trust=trust)
    description = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if description["remark"]:
        print_note(description["remark"])
    if as_json:
        keys = ("run", "method", "client", "client_name", "round", "accuracy", "test_rows", "labels")
        print_json({"folder": str(folder), "files": files, **{key: description[key] for key in keys}})
        return 0
    print_text(
        f"{truncate(description['method'])}, client {truncate(description['client_name'])}, "
        f"round {description['round']}: accuracy {100 * description['accuracy']:.2f} % "
        f"on its {description['test_rows']} test rows"
    )
    print_text(f"model   {folder}: {', '.join(files)}")
    example = {"images": "new.png", "arrays": "new.npz"}.get(description["kind"], "new.csv")
    print_text(f"use     python {folder / 'score.py'} {example}")
    return 0


@click.command("predict", cls=Command)
@click.argument("run", cls=Argument, help="folder of a run, or its name in runs/")
@click.option("--client", required=True, metavar="NAME|N", help="name or number of the client")
@click.option(
    "--data", required=True, metavar="FILE", help="new rows: .csv, .tsv, .npz, an image or a folder"
)
@ROUND
@CODE
@TRUST
@AS_JSON
def predict(
    run: str, client: str, data: str, round_: str, code: tuple[str, ...], trust: bool, as_json: bool
) -> int:
    """Predict new rows with one client's model: a label and its probabilities for each."""
    from feddbe import export

    predictions = export.predict(run, client, data, round=round_, code=code, trust=trust)
    if predictions["remark"]:
        print_note(predictions["remark"])
    if as_json:
        print_json(predictions)
        return 0
    names = [truncate(name) for name in predictions["labels"]]
    width = max(map(len, ("label", *names)))
    print_text("\t".join([f"{'label':<{width}}", *names]))
    for row in predictions["rows"]:
        print_text(
            "\t".join([f"{truncate(row['label']):<{width}}", *(f"{p:.4f}" for p in row["probabilities"])])
        )
    return 0
