"""A Parquet table with a text column (a CSV file does as well); needs feddbe[table].

The same on the command line: feddbe run fedavg+dbe --data reviews.parquet --rounds 2
"""

import random

import pyarrow
from pyarrow import parquet

import feddbe

chance = random.Random(0)
rows = []
for _ in range(120):
    label = chance.choice(["good", "bad"])
    praise = chance.choice({"good": ["Great", "Lovely"], "bad": ["Awful", "Boring"]}[label])
    thing = chance.choice(["film", "book", "play"])
    rows.append({"text": f"{praise} {thing}!", "label": label, "client": chance.choice("abc")})
parquet.write_table(pyarrow.Table.from_pylist(rows), "reviews.parquet")

run = feddbe.run("fedavg+dbe", data="reviews.parquet", rounds=2)
print(run["config"]["model"], "accuracy", run["last"]["accuracy"]["weighted"])
