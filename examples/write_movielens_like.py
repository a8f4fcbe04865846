"""Write ratings in the form of MovieLens 100K: users, movies with genres, times, and some missing values.

    python examples/write_movielens_like.py ratings.parquet [--rows 20000]

Some movies are better than others, some users are easier to please, and a user prefers some genres.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, MOVIES = 943, 1682
GENRES = np.array(
    [
        "Action",
        "Adventure",
        "Animation",
        "Comedy",
        "Crime",
        "Drama",
        "Horror",
        "Musical",
        "Romance",
        "Sci-Fi",
        "Thriller",
        "War",
    ]
)
OCCUPATIONS = np.array(["artist", "doctor", "engineer", "étudiant", "lawyer", "none", "writer"])
FIRST_RATING, DAYS = np.datetime64("1997-09-20"), 214

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("path", type=Path, help="the Parquet file")
parser.add_argument("--rows", type=int, default=20_000, help="ratings (default: %(default)s)")
options = parser.parse_args()

rng = np.random.default_rng(0)
taste = rng.normal(size=(USERS, len(GENRES)))
has_genre = rng.random((MOVIES, len(GENRES))) < 0.15
has_genre[np.arange(MOVIES), rng.integers(0, len(GENRES), MOVIES)] = True  # each movie has at least one
quality, mood = 1.5 * rng.normal(size=MOVIES), rng.normal(size=USERS)
age, occupation = rng.integers(7, 74, USERS), rng.choice(OCCUPATIONS, USERS)
zip_code = np.array([f"{code:05d}" for code in rng.integers(0, 99_950, USERS)], object)
zip_code[rng.random(USERS) < 0.05] = None

user = (USERS * rng.random(options.rows) ** 1.5).astype(int)  # some users rate more than others
movie = (MOVIES * rng.random(options.rows) ** 2).astype(int)
fit = (taste[user] * has_genre[movie]).sum(axis=1) / np.sqrt(has_genre[movie].sum(axis=1))
liked = rng.random(options.rows) < 1 / (1 + np.exp(-fit - quality[movie] - mood[user]))
time = FIRST_RATING + rng.integers(0, DAYS * 86_400, options.rows).astype("timedelta64[s]")
table = {
    "user_id": user + 1,
    "movie_id": movie + 1,
    "genres": [GENRES[of_movie].tolist() for of_movie in has_genre[movie]],
    "age": pa.array(age[user], mask=rng.random(options.rows) < 0.02),
    "occupation": occupation[user],
    "zip_code": pa.array(zip_code[user], pa.string()),
    "timestamp": time,
    "liked": liked.astype(int),  # 4 or 5 stars
}
pq.write_table(pa.table(table), options.path)
