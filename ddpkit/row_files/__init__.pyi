from ddpkit.row_files.chunk import INDEX as INDEX, Chunk as Chunk, RowFormat as RowFormat
from ddpkit.row_files.columns import Columns as Columns
from ddpkit.row_files.json_lines import JsonLines as JsonLines
from ddpkit.row_files.merging import merge_files as merge_files
from ddpkit.row_files.parquet import ParquetRows as ParquetRows
from ddpkit.row_files.sorted_writer import SortedWriter as SortedWriter
from ddpkit.row_files.synced import rename_synced as rename_synced, synced_file as synced_file
