"""Take a model home: what a client of a run deploys, as files that need no feddbe; predictions with it."""

from feddbe.export.folder import export_model
from feddbe.export.scores import predict

__all__ = ["export_model", "predict"]
