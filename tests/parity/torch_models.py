"""Plain torch modules, by name."""

from torch.nn import LSTM
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from tests.parity.layer_habits import (
    Adapted,
    AnyOrder,
    Frozen,
    GivesItsInput,
    GivesMapping,
    GivesTuple,
    GivesViews,
    HasUnused,
    Hooked,
    ModuleHooks,
    OddWeights,
    OneManyTimes,
    PassesThrough,
    SameTwice,
    SeveralLosses,
    StochasticDepth,
    TakesInputs,
    TakesMappings,
    TakesTuples,
    TakesViews,
    Tied,
    Twice,
    UsesOneOutput,
    WritesInto,
)
from tests.parity.layer_kinds import (
    Convolutions,
    Encoder,
    EncoderDecoder,
    Perceptron,
    Recurrent,
    SingleOperationsLSTM,
    images,
    inside,
    itself,
)
from tests.parity.stacks import STACK, Dropping, growing, loss_of, stack
from tests.parity.subject import Subject

MODELS: dict[str, Subject] = {
    "encoder": Subject(Encoder, loss_of, STACK, streamed=("TransformerEncoderLayer",)),
    "encoder_norm_first": Subject(lambda: Encoder(norm_first=True), loss_of, STACK, streamed=("TransformerEncoderLayer",)),
    "encoder_eval": Subject(lambda: Encoder(training=False), loss_of, STACK, streamed=("TransformerEncoderLayer",)),
    "encoder_decoder": Subject(EncoderDecoder, loss_of, STACK, streamed=("TransformerEncoderLayer", "TransformerDecoderLayer")),
    "mlp": Subject(Perceptron, loss_of, STACK, streamed=("Linear",)),
    "lstm": stack(Recurrent, SingleOperationsLSTM),
    "dropout": stack(block=Dropping),
    "convolutions": Subject(Convolutions, loss_of, images, streamed=("Sequential",)),
    "channels_last": Subject(lambda: Convolutions(channels_last=True), loss_of, images, streamed=("Sequential",)),
    "spectral_norm_inside": stack(block=inside(parametrizations.spectral_norm), streamed="Block"),
    "spectral_norm_itself": stack(block=itself(parametrizations.spectral_norm), streamed="ParametrizedLinear"),
    "spectral_norm_hook_inside": stack(block=inside(spectral_norm), streamed="Block"),
    "weight_norm_inside": stack(block=inside(parametrizations.weight_norm), streamed="Block"),
    "weight_norm_itself": stack(block=itself(parametrizations.weight_norm), streamed="ParametrizedLinear"),
    "weight_norm_hook_inside": stack(block=inside(weight_norm), streamed="Block"),
    "twice": stack(Twice),
    "one_many_times": stack(OneManyTimes, number=2),
    "same_twice": Subject(SameTwice, loss_of, STACK),
    "stochastic_depth": stack(StochasticDepth, number=4),
    "any_order": stack(AnyOrder, number=4),
    "tuples": stack(TakesTuples, GivesTuple),
    "mappings": stack(TakesMappings, GivesMapping),
    "in_place": stack(WritesInto),
    "input_returned": stack(TakesInputs, GivesItsInput),
    "passed_through": stack(block=PassesThrough, batch=growing),
    "views": stack(TakesViews, GivesViews),
    "one_output_used": stack(UsesOneOutput, GivesItsInput),
    "growing": stack(batch=growing),
    "frozen": stack(Frozen),
    "adapted": stack(Adapted),
    "tied": stack(Tied),
    "unused": stack(block=HasUnused, batch=growing),
    "several_losses": stack(SeveralLosses),
    "parameter_hooks": stack(Hooked),
    "module_hooks": stack(ModuleHooks),
    "odd_weights": stack(block=OddWeights),
}

CPU_ALONE: dict[str, Subject] = {"lstm_of_one_kernel": stack(Recurrent, LSTM)}
"""Models that another device computes by other operations."""
