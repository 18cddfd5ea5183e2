"""What `foxray train` ends with: the tables of the run it just finished, read back from the ledger."""

from foxray.cli.console import print_json


def print_outcome(storage: str, run_id: str, *, as_json: bool) -> None:
    """Attempts, batch sizes, peak memory and losses of a run; one JSON record with `as_json`."""
    from foxray.cli.show import print_attempts, print_epochs, print_phases
    from foxray.cli.tables import open_console
    from foxray.ledger.store import Ledger
    from foxray.ledger.summary import summarize_run

    summary = summarize_run(Ledger(storage).run(run_id))
    assert summary is not None
    if as_json:
        print_json("info", "summary", {"run": summary.to_dict()})
        return
    console = open_console()
    print_attempts(console, summary)
    print_phases(console, summary)
    print_epochs(console, summary)
    console.print(f"run {run_id}: foxray show {run_id} --storage {storage}", markup=False, highlight=False)
