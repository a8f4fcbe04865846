"""``hotrow replay`` and ``hotrow check --skew``: compare a request log with versions and with training data.

``tables`` reads the log and other files, and joins them. ``rows`` are the logged requests as a model reads them.
``figures`` compares answers. The package is in ``hotrow`` because it uses the sessions of serving and the figures of
training.
"""
