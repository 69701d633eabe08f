"""A server that speaks the providers' HTTP APIs from a script of rounds, with faults and a bill; needs the extra `fake-model`.

`FakeModel` runs it in this process; `turnkeeper fake-model` is the same as a command.
"""

from turnkeeper.models.fake.script import Fault, Script, ScriptedCall, ScriptedRound, load_script
from turnkeeper.models.fake.server import FakeModel

__all__ = ["FakeModel", "Fault", "Script", "ScriptedCall", "ScriptedRound", "load_script"]
