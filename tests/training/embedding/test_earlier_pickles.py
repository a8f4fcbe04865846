"""Tables that an earlier version has pickled, for example as part of ``torch.save(model)``."""

import pickle
import zlib
from base64 import b64decode

import numpy as np

from training.embedding import EmbeddingTable

# pickle.dumps of an EmbeddingTable with a dim of 2 and the keys 7 and 9, whose vectors are 0.5: revision efce656b
EARLIER = (
    "eNrdlc9PnEAUx4FFV/FHjKfapEkvTfCyqbsr7p5MtNUD7ba1PXAxExZGmIrAMIOJTUz0oKnN3HZ66x/QP6vX/glteugDdq0aTTa96UuYgeHLl/"
    "c+8wIn+tfTKaUM8YhnLolJHDTwQR/7fnHG3X6EpTBQHqfE24+wLwfSDBUx/3Kk+VBKBlKoXIqlWzy8JN4jgRSLl49suMFmtTiQy6dyV5q2JvQD"
    "7MZyuSf0vbTVlOGkmAIR427MR7Lt9R9Vrm7fVnu9bWUYF7hv12zFVs/lsTSFnuVF0jUW+FLMQzqcuBECJ44ZuAh9Hx8xKWZ5knlhA+WcRHC5iD"
    "Lcz0nkI45jlmTosFnUKuYqGYPJDcB2AUWJ66O9LDlA/aPCciA3DFVRTrQvRvTn29avpx+/v11qnGivf9ZgPKaK6SxAlmmW8MRLInSIM0aSmKog"
    "cObgTkQ4jzDCsU/cmGqfHQMW+VGKESOfMKO1Y6qbzgQssjDJOJ2wNacGVyTmdNLWHb3wSOKA1m09z+GdplMvxFXKVPHKEoxXIHlfrRlUdeZB0m"
    "11rI7V7rY77RXrOa1svTSnNVvrcaq/A7NdqtymVd2GNuRfH87Tw1meyR0J+6GdSVs9kxdiBsqOsMehaiA98ybzcYb9F8Qrt3ZHctCLidTNOJPh"
    "YzN8sjFzH4BuQSfwO4m2ulbnGlH9bqKlFojqymWsXz0uidrauYQROv0ifDYiZ0Qu49DgOB3hu/f9uAJQOmP2Y6W90o8342Y//iM3xaKEI+I/FG"
    "7W2qpltcfjNtT+F7dZRoKQYx+Vn9KS3ebv+w1uba3bvAZOuRtcqQVwN0EpAEq5Bmq6BAX/vIdBaXWl1eyMSanSjkMpL4bGX0yfdSw="
)


def test_a_pickled_table_of_an_earlier_version_opens():
    table = pickle.loads(zlib.decompress(b64decode(EARLIER)))

    assert isinstance(table, EmbeddingTable)
    assert (table.name, table.config.combiner) == ("t", "mean")
    keys, vectors = table.rows()
    np.testing.assert_array_equal(keys, [7, 9])
    np.testing.assert_array_equal(vectors, np.full((2, 2), 0.5, np.float32))
