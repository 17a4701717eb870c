"""Mixture of experts: router, grouped products, expert parallelism, decoding.

``mixture.py`` is the layer, ``config.py`` its sizes, ``dense.py`` the feed-forward of other layers
that have no experts. ``rows.py`` sorts tokens by expert, ``exchange.py`` sends them to the devices
of their experts, ``chunks.py`` runs a part at a time, and ``decoding.py`` a decoding step.

Arrays are indexed in these spaces, for T tokens of a device, k experts per token, and, if experts
are on n devices, rounds of C assignments and S tokens per device, a token having at most m experts
on one device. ``a_of_b`` holds for each b its a; where there is none, an index past the end.

    ==========  ==========  ==================================================================
    token       T           a token of this device
    assignment  T k         a token and one of its experts; assignment i is of token ``i // k``
    row         T k         the assignments in the order of their experts: what the grouped
                            products read. After an exchange ``n C``: the received ones
    place       n C         an assignment in what is sent; place i is to device ``i // C``
    pair        T min(k,n)  a token and a device that has some of its experts
    slot        n S         a token in what is sent, once per device; slot i is to ``i // S``
    copy        n S m       a received token and one of its experts here; copy i is of slot
                            ``i // m``
    ==========  ==========  ==================================================================
"""

from burst_jax.models.experts.config import Experts as Experts
from burst_jax.models.experts.dense import DenseMLP as DenseMLP
from burst_jax.models.experts.mixture import MixtureOfExperts as MixtureOfExperts
