"""Loaded into the process that forks the lives of `model_scenario`: they find everything built that takes seconds to build."""

import asyncio

from tests.crash import model_scenario

asyncio.run(model_scenario.warm_up())
