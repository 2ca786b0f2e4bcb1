"""Take a model home: what a client of a run deploys, as files that need no feddbe; predictions with it."""

from feddbe.export.client_model import predict
from feddbe.export.folder import export_model

__all__ = ["export_model", "predict"]
