"""What loads a model inside vLLM's workers (`--worker-extension-cls`)."""

from __future__ import annotations

from typing import Any


class LoadingWorker:
    """Methods that vLLM adds to its worker class; they are called by `collective_rpc`."""

    # The worker's attributes used here.
    reload_weights: Any
    model_runner: Any

    def headway_load(self, path: str) -> None:
        """Load the weights of a model directory in place, everything that is made of them included.

        vLLM 0.32 makes kernel weights anew for each module whose own weights were in the checkpoint. A module
        whose weights are tied to another's (`lm_head` to `embed_tokens`) has none there: its packed copy,
        where the platform has one (CPUs), would stay that of the model before.
        """
        self.reload_weights(weights_path=path)
        owners: dict[int, Any] = {}
        for module in self.model_runner.get_model().modules():
            for weight in module.parameters(recurse=False):
                tied = weight.numel() and owners.setdefault(weight.data_ptr(), module) is not module
                if tied and hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
