"""Layouts: the sequence permutations over the shards of a ring."""

from burst_jax.layouts.balanced import Placement as Placement
from burst_jax.layouts.balanced import balance as balance
from burst_jax.layouts.balanced import balance_batch as balance_batch
from burst_jax.layouts.balanced import zone_sizes as zone_sizes
from burst_jax.layouts.balanced_layout import Balanced as Balanced
from burst_jax.layouts.fixed import Contiguous as Contiguous
from burst_jax.layouts.fixed import Striped as Striped
from burst_jax.layouts.fixed import Zigzag as Zigzag
from burst_jax.layouts.layout import Layout as Layout
from burst_jax.layouts.ring_costs import RingCosts as RingCosts
from burst_jax.layouts.tables import DocumentTables as DocumentTables
from burst_jax.layouts.tables import document_tables as document_tables
from burst_jax.layouts.work import WorkReport as WorkReport
from burst_jax.layouts.work import work_report as work_report
