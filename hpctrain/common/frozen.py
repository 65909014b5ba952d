"""The base of the models that hpctrain itself writes down: plans, records, manifests, requests."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """Unknown keys are refused, and values do not change. What checks it is built where it is used first."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
