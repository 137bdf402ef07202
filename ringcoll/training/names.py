"""Names of models, optimizers and graphs; pages of help show them without torch."""

MODELS = ("perceptron", "transformer")
"""The models by name: a perceptron reads digits, a transformer continues a text."""
LEARNING_RATES = {"sgd": 0.02, "adamw": 0.002}
"""The optimizers by name, each with the learning rate that is used if none is given."""
LAYERS = 4
"""Layers of a model, if none are given."""
GRAPHS = ("ring", "exponential")
"""Who averages with whom, in gossip."""
