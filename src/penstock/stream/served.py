"""The stages of a process that does not feed: it receives them and serves one stream after the other."""

import torch

from penstock.deploy.jobs import MakeRuntime, read_stages, receive_stages
from penstock.engine.executor import OwnStages
from penstock.engine.tracers import follow_stages
from penstock.errors import TransportError
from penstock.group.world import World
from penstock.transport.messages import CLOSE


class ServedStages:
    """Stages and weights from the process that feeds, or modules that this process has; `make` then makes runtimes.

    Raises the reason why they cannot be had, once the other processes have been told of it.
    """

    def __init__(self, world: World, make: MakeRuntime | None) -> None:
        self._world = world
        self.closed = False
        try:
            job, runtimes = read_stages(world, receive_stages(world.transport), make)
            torch.set_num_threads(job.threads)
            own = self._own = OwnStages(world, job, runtimes)
            self._stream_ended = follow_stages(own)
        except TransportError as error:
            raise world.explain(error) from error
        except Exception as error:
            world.health.report(error)
            raise

    def serve(self) -> None:
        """Work until a stream has ended, or the stages are closed."""
        try:
            self.closed = self._own.serve_stream() == CLOSE
            if not self.closed:
                self._stream_ended()
        except TransportError as error:
            raise self._world.explain(error) from error
        except Exception as error:
            self._world.health.report(error)
            raise

    def serve_to_end(self) -> None:
        """Work until the stages are closed."""
        while not self.closed:
            self.serve()
