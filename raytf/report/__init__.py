"""A run as one page of HTML, from its events and what else its storage holds: no network, no
script.

Owns what a person sees of a run. `page` puts it together, `curves` draws metrics, `style` is the
look. What the state of a run is belongs to `raytf.status`.
"""
