"""A Hugging Face data set that was saved to disk; needs feddbe[hub].

The same on the command line: feddbe run fedavg+dbe --data saved --partition iid --clients 3 --rounds 2
With the network, by name: feddbe run fedavg+dbe --data hf:fancyzhx/ag_news --rounds 2
"""

import random

import datasets

import feddbe

rng = random.Random(0)
labels = [rng.randrange(2) for _ in range(90)]
texts = [f"{rng.choice(['it is', 'this was'])} {['cold', 'warm'][label]}" for label in labels]
datasets.Dataset.from_dict({"text": texts, "label": labels}).save_to_disk("saved")

run = feddbe.run("fedavg+dbe", data="saved", partition="iid", clients=3, rounds=2)
print(run["config"]["model"], "accuracy", run["last"]["accuracy"]["weighted"])
