from ddpkit.object_store.lock import StoreLock as StoreLock
from ddpkit.object_store.name_index import NameIndex as NameIndex
from ddpkit.object_store.objects import Objects as Objects
from ddpkit.object_store.url import is_url as is_url, shown_url as shown_url
