"""Training data: documents are read, packed into sequences, shuffled, sharded, resumed exactly.

It needs the extra ``data``: ``pip install 'burst-jax[data]'``.
"""

from burst_jax.errors import missing as _missing

try:
    import grain as _grain  # noqa: F401 - names the extra to install before a module below fails
except ModuleNotFoundError as error:
    raise _missing(error, "grain", user="burst_jax.data", extra="data") from None

from burst_jax.data.chat_check import ChatCounts as ChatCounts
from burst_jax.data.chat_check import check_chats as check_chats
from burst_jax.data.chat_template import ChatTemplate as ChatTemplate
from burst_jax.data.chats import ChatTokens as ChatTokens
from burst_jax.data.chunks import save_tokens as save_tokens
from burst_jax.data.corpus import Corpus as Corpus
from burst_jax.data.corpus import open_corpus as open_corpus
from burst_jax.data.corpus import python_source as python_source
from burst_jax.data.loader import Loader as Loader
from burst_jax.data.loader import Rows as Rows
from burst_jax.data.loader import gather_state as gather_state
from burst_jax.data.loader import merge_states as merge_states
from burst_jax.data.loader import rows_of_process as rows_of_process
from burst_jax.data.packing import Packing as Packing
from burst_jax.data.tokens import ByteTokens as ByteTokens
from burst_jax.data.tokens import TokenizerFile as TokenizerFile
