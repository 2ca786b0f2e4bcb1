"""`feddbe export`: the model of one client, as files that need no feddbe."""

from __future__ import annotations

from pathlib import Path

import click

from feddbe.cli.command import AS_JSON, CODE, TRUST, Argument, Command, print_error, print_json
from feddbe.errors import truncate


@click.command("export", cls=Command)
@click.argument("run", cls=Argument, help="folder of a run, or its name in runs/")
@click.option("--client", required=True, metavar="NAME|N", help="whose model: a client's name or number")
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@click.option("--out", metavar="DIR", type=Path, help="folder to write; default: RUN-client-NAME here")
@click.option("--onnx", is_flag=True, help="also as ONNX (pip install 'feddbe[onnx]')")
@CODE
@TRUST
@AS_JSON
def export(
    run: str,
    client: str,
    which: str,
    out: Path | None,
    onnx: bool,
    code: tuple[str, ...],
    trust: bool,
    as_json: bool,
) -> int:
    """Take a client's model home: weights, program, preprocessing and a script that scores new rows."""
    import json

    from feddbe.export import export_model

    folder = export_model(run, client, round=which, out=out, onnx=onnx, code=code, trust=trust)
    about = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
    files = sorted(path.name for path in folder.iterdir() if path.is_file())
    if about["remark"]:
        print_error(about["remark"], 0)
    if as_json:
        told = ("run", "method", "client", "client_name", "round", "accuracy", "test_rows", "labels")
        print_json({"folder": str(folder), "files": files, **{key: about[key] for key in told}})
        return 0
    print(
        f"{truncate(about['method'])}, client {truncate(about['client_name'])}, round {about['round']}: accuracy "
        f"{100 * about['accuracy']:.2f} % on its {about['test_rows']} test rows"
    )
    print(f"model   {folder}: {', '.join(files)}")
    example = {"images": "new.png", "arrays": "new.npz"}.get(about["kind"], "new.csv")
    print(f"use     python {folder / 'score.py'} {example}")
    return 0


@click.command("predict", cls=Command)
@click.argument("run", cls=Argument, help="folder of a run, or its name in runs/")
@click.option("--client", required=True, metavar="NAME|N", help="whose model: a client's name or number")
@click.option(
    "--data", required=True, metavar="FILE", help="new rows: .csv, .tsv, .npz, an image or a folder"
)
@click.option("--round", "which", default="best", metavar="NAME", help="round: best or last [best]")
@CODE
@TRUST
@AS_JSON
def predict(
    run: str, client: str, data: str, which: str, code: tuple[str, ...], trust: bool, as_json: bool
) -> int:
    """Predict new rows with one client's model: a label and its probabilities for each."""
    from feddbe import export

    found = export.predict(run, client, data, round=which, code=code, trust=trust)
    if found["remark"]:
        print_error(found["remark"], 0)
    if as_json:
        print_json(found)
        return 0
    names = [truncate(name) for name in found["labels"]]
    width = max(map(len, ("label", *names)))
    print("\t".join([f"{'label':<{width}}", *names]))
    for row in found["rows"]:
        print("\t".join([f"{truncate(row['label']):<{width}}", *(f"{p:.4f}" for p in row["probabilities"])]))
    return 0
