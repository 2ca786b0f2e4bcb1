"""Export of a client's model as files that do not need feddbe, and predictions with it."""

from feddbe.export.client_model import predict
from feddbe.export.folder import export_model

__all__ = ["export_model", "predict"]
