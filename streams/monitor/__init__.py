"""The Monitor: what the pipeline does right now, from its own topics, as JSON, a page and Prometheus metrics.

``blocks`` and ``figures`` are pure: records in, sums and figures out. ``connect`` maps the broker settings to Faust's
client and finds where reading begins, ``app`` is the Faust application, ``web`` serves.
"""
