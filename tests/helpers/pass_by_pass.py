"""A minibatch of PPO or A2C pass by pass, with heads and losses in C: what the one call in C is compared with."""

import ctypes

import torch

from rl_cluster_benchmark.kernels import heads
from rl_cluster_benchmark.learning.minibatch import PassesInC, TorchPasses


class HeadsInC:
    """The structure that PassesInC hands to the code in C, behind any network."""

    def __init__(self, learner, hyper, batch, moments, loss):
        class NoNetwork:
            entry_points, seconds = (0, 0), (ctypes.c_double * 3)()

        in_c = PassesInC(learner, hyper, 1, batch, moments, loss, NoNetwork())
        self._kept, self._minibatch = in_c, in_c.minibatch._minibatch

    def __call__(self, features, rows, vector):
        """Add to the vector's gradients of the heads and statistics; return the gradient of the features."""
        gradient = torch.empty_like(features)
        self._minibatch.rows, self._minibatch.to = rows.data_ptr(), vector
        heads.compiled().heads_pass(
            ctypes.byref(self._minibatch), 0, len(features), features.data_ptr(), gradient.data_ptr()
        )
        return gradient


class PassByPass(TorchPasses):
    """The network's forward and backward pass as two calls, with the heads and losses in C as a third."""

    @torch.no_grad()
    def _pass(self, rows):
        behind = HeadsInC(self.learner, self.hyper, self.batch, self.moments, self.objective.in_c)
        features, back = self.learner.model.pass_through(self.batch.observations, rows)
        back(behind(features, rows, self.learner.vectors_in_c.address(self.learner.written_to)))
