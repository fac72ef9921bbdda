"""A minibatch of PPO or A2C pass by pass, with heads and losses in C: what the one call in C is compared with."""

import ctypes

import torch

from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.learning.minibatch import PassesInC, TorchPasses

STATISTICS = 5  # of a sample


class Samples(ctypes.Structure):
    """`Samples` in heads.h."""

    _fields_ = (("minibatch", ctypes.c_void_p), ("rows", ctypes.c_void_p), ("written", ctypes.c_void_p))


class HeadsInC:
    """The structure that PassesInC hands to the code in C, behind any network."""

    def __init__(self, learner, hyper, batch, moments, loss):
        class NoNetwork:
            entry_points, seconds = (0, 0), (ctypes.c_double * 3)()

        in_c = PassesInC(learner, hyper, batch, moments, loss, NoNetwork())
        self._kept, self._minibatch = in_c, in_c.minibatch._minibatch

    def __call__(self, features, rows, vector):
        """Add to the vector's gradients of the heads and statistics; return the gradient of the features."""
        gradient = torch.empty_like(features)
        written = torch.empty(len(features), self._minibatch.heads.num_actions + 1 + STATISTICS)
        samples = Samples(ctypes.addressof(self._minibatch), rows.data_ptr(), written.data_ptr())
        code, count = heads.compiled(), ctypes.c_long(len(features))
        places = [ctypes.c_void_p(part.data_ptr()) for part in (features, gradient)]
        code.heads_pass(ctypes.byref(samples), ctypes.c_long(0), count, *places)
        code.heads_add(ctypes.byref(samples), count, places[0], ctypes.c_void_p(vector))
        return gradient


class PassByPass(TorchPasses):
    """The network's forward and backward pass as two calls, with the heads and losses in C as a third."""

    @torch.no_grad()
    def _pass(self, rows):
        behind = HeadsInC(self.learner, self.hyper, self.batch, self.moments, self.objective.in_c)
        features, back = self.learner.model.pass_through(self.batch.observations, rows)
        back(behind(features, rows, self.learner.vectors_in_c.address(self.learner.written_to)))
