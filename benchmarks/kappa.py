"""Magnitude of MR's loss relative to the task loss, for several kappa: the paper's criterion for kappa.

No test data is used.

    python benchmarks/kappa.py [--data digits] [--rounds 10] [--kappa 0.1 1 10 50]

Runs FedAvg+MR with several kappa and prints, over the batches of every fifth round, the mean cross-entropy,
the mean of MR's loss kappa/2 mean_k (r_k - zbar_k)^2, and the kappa at which both would be equal.

With mu = 1, r is the mean of a batch of B samples. The expected loss then has two parts, the distance of the
client's mean and kappa/(2B) times the features' variance, which no translation of the mean can lower. The
last two columns are that variance within batches, mean over features, and its part of MR's loss.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from feddbe.callbacks.base import Callback
from feddbe.config.options import Config
from feddbe.runs.experiment import resolve
from feddbe.runs.store import RunStore
from feddbe.simulation import engines
from feddbe.simulation.loop import RoundLoop, initial_server_state
from feddbe.state import State, drop_keys
from feddbe.training.loss_terms import MeanRegularizer, Term, TermContext
from feddbe.training.trainer import ClientTrainer


def mean_losses(loop: RoundLoop, kappa: float, t: int) -> tuple[float, float, float]:
    """Return means over the batches of round t.

    They are the task loss, 1/2 mean_k (r_k - zbar_k)^2, and the variance of a feature within the batch.
    """
    task, server = loop.task, loop.server_state
    regularizer = MeanRegularizer(1.0, kappa / 2)
    distances = list[float]()
    variances = list[float]()

    def record_distance(context: TermContext, carry: State) -> tuple[Tensor | None, State]:
        loss, new_carry = regularizer(context, carry)
        distances.append(0.5 * float(F.mse_loss(new_carry["r"], context.const["mean"])))
        variances.append(float(context.batch.z_g.detach().var(0).mean()))
        return loss, new_carry

    term = Term(record_distance, {"mean": server["mean"]}, regularizer.init_carry(task.model.feature_shape))
    total, samples = 0.0, 0
    for client in range(task.split.clients):
        trainer = ClientTrainer(task, t, client)
        trainer.fit(drop_keys(server, ["mean"]), terms=[term])
        total, samples = total + trainer.losses["shared"][0], samples + trainer.losses["shared"][1]
    return total / samples, sum(distances) / len(distances), sum(variances) / len(variances)


def observe(kappa: float, data: str, rounds: int, interval: int = 5) -> None:
    """Run FedAvg+MR and print the losses of every fifth round."""
    experiment = resolve(f"fedavg+mr(kappa={kappa})", Config(data=data, rounds=rounds))
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore.create(Path(folder) / "run", {}, initial_server_state(experiment))
        engine = engines.create_engine("auto", experiment.task, experiment.method)
        loop = RoundLoop(experiment, store, engine, Callback())
        for t in range(rounds + 1):
            if t > 0 and t % interval == 0:
                task_loss, distance, variance = mean_losses(loop, kappa, t)
                text = f"task loss {task_loss:.3f}  MR loss {kappa * distance:.3f}"
                equal = task_loss / distance
                share = variance / (2 * experiment.options.batch_size) / distance
                text += f"  equal at kappa {equal:.3g}  variance {variance:.4f} ({share:.0%} of MR's loss)"
                print(f"kappa {kappa:<4g} round {t:<3d} {text}", flush=True)
            if t == 0:
                loop.run_setup()
            else:
                loop.run_round(t)
        engine.close()
        store.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="digits")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kappa", type=float, nargs="+", default=[0.1, 1, 10, 50])
    arguments = parser.parse_args()
    for kappa in arguments.kappa:
        observe(kappa, arguments.data, arguments.rounds)


if __name__ == "__main__":
    main()
