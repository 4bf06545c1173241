"""An exponential moving average of the weights of a run, which is scored and saved in place of the last weights."""

from torch.optim.swa_utils import get_ema_multi_avg_fn

from lm.formats.folder import saved_state
from lm.model.transformer import Transformer


def update_average(average: Transformer, net: Transformer, decay: float, n_steps: int) -> None:
    """Move the weights of `average` towards those of `net`, after `n_steps` earlier steps.

    The decay rises to `decay` with the steps, as in TensorFlow's ExponentialMovingAverage: otherwise the average of a
    short run would consist of weights from its beginning. A head that is tied for now counts as the embedding, so the
    average of a head that is untied in mid-training continues that of the embedding.
    """
    weights = saved_state(net)
    averages = {name: tensor for name, tensor in average.state_dict().items() if tensor.is_floating_point()}
    update = get_ema_multi_avg_fn(min(decay, (1 + n_steps) / (10 + n_steps)))  # type: ignore[no-untyped-call]
    update([*averages.values()], [weights[name] for name in averages], n_steps)
