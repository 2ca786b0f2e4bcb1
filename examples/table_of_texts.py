"""A Parquet table with a text column (or a CSV file); needs feddbe[table].

The same on the command line: feddbe run fedavg+dbe --data reviews.parquet --rounds 2
"""

import random

import pyarrow
from pyarrow import parquet

import feddbe

rng = random.Random(0)
rows = []
for _ in range(120):
    label = rng.choice(["good", "bad"])
    praise = rng.choice({"good": ["Great", "Lovely"], "bad": ["Awful", "Boring"]}[label])
    thing = rng.choice(["film", "book", "play"])
    rows.append({"text": f"{praise} {thing}!", "label": label, "client": rng.choice("abc")})
parquet.write_table(pyarrow.Table.from_pylist(rows), "reviews.parquet")

run = feddbe.run("fedavg+dbe", data="reviews.parquet", rounds=2)
print(run["config"]["model"], "accuracy", run["last"]["accuracy"]["weighted"])
