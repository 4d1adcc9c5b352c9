"""HTTP: the OpenAI API over an engine."""

from plait.server.app import create_app
from plait.server.settings import ServerSettings

__all__ = ["ServerSettings", "create_app"]
