"""A CSV table of numbers; its label and client columns have other names.

The same on the command line: feddbe run fedavg+dbe --data "people.csv?label=buys&client=town" --rounds 2
"""

import csv
import random
from pathlib import Path

import feddbe

rng = random.Random(0)
rows = []
for _ in range(120):
    age, income = rng.randint(18, 80), rng.randint(10_000, 90_000)
    rows.append([age, income, rng.choice(["Ulm", "Bonn", "Trier"]), "yes" if income > 900 * age else "no"])
with Path("people.csv").open("w", newline="", encoding="utf-8") as file:
    csv.writer(file).writerows([["age", "income", "town", "buys"], *rows])

run = feddbe.run("fedavg+dbe", data="people.csv?label=buys&client=town", rounds=2)
print(run["config"]["clients"], "clients, accuracy", run["last"]["accuracy"]["weighted"])
