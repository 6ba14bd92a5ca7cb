"""Numbers that make no sense are refused in one line, before anything is read or written."""
import pytest

import evaluate
import kl_diagnostics
import train_opsd


@pytest.mark.parametrize("stage, flag", [(evaluate, "seeds"), (evaluate, "batch_tasks"), (evaluate, "max_new_tokens"), (kl_diagnostics, "rollouts"),
                                         (kl_diagnostics, "chunk"), (train_opsd, "kl_chunk"), (train_opsd, "row_tokens"), (train_opsd, "eval_seeds")])
@pytest.mark.parametrize("value", [0, -1])
def test_a_count_below_one_is_refused(stage, flag, value, tmp_path):
    cfg = stage.Config(out_dir=str(tmp_path / "out"), **{flag: value})
    with pytest.raises(SystemExit, match=rf"^error: .*--{flag}.* at least 1$"):
        stage.main(cfg)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    from common import load_model
    with pytest.raises(SystemExit, match=f"cannot load model {tmp_path}"):
        load_model(str(tmp_path))
