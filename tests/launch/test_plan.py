"""The plan of an attempt, as pure functions and as `muster plan` prints it: the whole text against a golden file."""

import difflib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collections_of_jobs import command_job, train_job
from jobs.errors import RefusedError
from jobs.placement import Host, place
from jobs.ranks import RankEnv
from jobs.rundir import RunDir
from jobs.site import Site
from jobs.spec import Job
from launch import cli
from launch.plan import Context, Machine, NodePlan, plan_nodes, preload, shared_environment, start_message

GOLDEN = Path(__file__).parent / "golden"
