"""A doctor's report in the forms that others read: a page for a browser, metrics for Prometheus.

Both are drawn from the JSON envelope (docs/json.md) and nothing else: a saved report can be drawn again.
"""
