"""Populations: several Learners that train in one compiled program, and callbacks that compare them."""

from fluxcb.populations.callback import PopulationCallback
from fluxcb.populations.halving import SuccessiveHalving
from fluxcb.populations.table import PopulationTable
from fluxcb.populations.training import PopulationBasedTraining

__all__ = ["PopulationBasedTraining", "PopulationCallback", "PopulationTable", "SuccessiveHalving"]
