"""What sites say of their tables, and what they agree on; every disagreement and bad value is one clear error."""

import numpy as np
import pandas as pd
import pytest
import torch
from agreeing import agreed, designs, sent
from formulaic import model_matrix

from fedual.errors import DataError, FedualError, InputError
from fedual.glm.formula import parse
from fedual.glm.schema import Columns, Schema, agree, describe, design, measure
from fedual.glm.tables import read

NONE = Columns()


def north() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "y": [0, 1, 1, 0, 1, 0],
            "x": [1.0, 2.5, np.nan, 4.0, 0.5, 3.0],
            "sex": ["m", "f", "f", None, "m", "m"],
            "grade": [1, 2, 2, 3, 10, 1],
            "w": [1.0, 2.0, 1.0, 1.0, 1.0, 3.0],
            "t": [2, 3, 4, 1, 5, 2],
            "b": [True, False, True, True, False, False],
            "died": ["yes", "no", "no", "yes", "no", "yes"],
        }
    )


def described(text: str, frame: pd.DataFrame, columns: Columns = NONE, **options):
    return describe(frame, "north", parse(text), columns, **options)


class TestDescribe:
    def test_what_a_site_says(self):
        reply, counts = described("y ~ x + sex + C(grade)", north(), Columns(weights="w"))
        assert sent(reply) == {
            "rows": 6,
            "complete": 4,
            "missing": {"x": 1, "sex": 1},
            "kinds": {"y": "numeric", "x": "numeric", "sex": "categorical", "grade": "numeric", "w": "numeric"},
            "levels": {"y": ["0", "1"], "sex": ["f", "m"], "grade": ["1", "2", "10"]},
            "rare": [],
        }
        assert counts["sex"] == {"m": 3, "f": 1}
        assert counts["grade"] == {"1": 2, "2": 1, "10": 1}

    def test_levels_with_few_rows_are_not_named(self):
        reply, counts = described("y ~ C(grade)", north(), least=2)
        assert reply["levels"]["grade"] == ["1", "2"]
        assert reply["rare"] == ["grade"]
        assert counts["grade"] == {"1": 2, "2": 2, "3": 1, "10": 1}

    def test_no_value_of_a_number_is_said(self):
        frame = north().assign(y=[3.25, 7.5, 1.125, 9.0, 2.0, 4.0])
        reply, counts = described("y ~ x + log(w)", frame)
        assert not reply["levels"]
        assert not counts

    def test_the_dot(self):
        reply, _ = described("y ~ .", north().filter(["y", "x", "w", "sex"]), Columns(weights="w"))
        assert reply["others"] == ["y", "x", "sex"]
        assert list(reply["kinds"]) == ["y", "x", "sex", "w"]

    def test_given_levels_are_the_only_ones(self):
        with pytest.raises(DataError, match=r"'north', column 'sex' has a level that is not in levels="):
            describe(north(), "north", parse("y ~ sex", ["sex"]), NONE, 1, {"sex": ["f", "x"]})

    def test_too_many_levels(self):
        frame = pd.DataFrame({"y": np.arange(3000.0), "name": [f"n{i}" for i in range(3000)]})
        with pytest.raises(DataError, match=r"'north', column 'name' has more than 1000 levels"):
            described("y ~ name", frame)


class TestLevels:
    @pytest.mark.parametrize("values", [[1, 2, 1], [1.0, 2.0, 1.0], ["1", "2", "1.0"], pd.Categorical([1, 2, 1])])
    def test_whole_numbers_are_one_level_however_they_are_written(self, values):
        other = pd.DataFrame({"y": [0.0, 1.0], "g": ["2", "3"]})
        frame = pd.DataFrame({"y": [0.0, 1, 2], "g": values})
        schema, (one, _) = designs("y ~ C(g)", {"a": frame, "b": other})
        assert schema.levels["g"] == ("1", "2", "3")
        assert schema.terms == ("Intercept", "C(g)[T.2]", "C(g)[T.3]")
        assert one.x.tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0]]

    def test_they_are_sorted_as_numbers(self):
        assert agreed("y ~ C(grade)", {"a": north()}).levels["grade"] == ("1", "2", "3", "10")

    def test_given_levels_keep_their_order(self):
        levels = {"grade": [10, 1, 2, 3, 4]}
        schema = agreed("y ~ grade", {"a": north()}, levels=levels)
        assert schema.terms[1:] == ("grade[T.1]", "grade[T.2]", "grade[T.3]", "grade[T.4]")
        assert schema.categorical == ("grade",)

    def test_a_level_at_one_site_only(self):
        other = north().assign(sex="x")
        schema, (_, found) = designs("y ~ sex", {"a": north(), "b": other})
        assert schema.levels["sex"] == ("f", "m", "x")
        assert found.x[:, 2].tolist() == [1.0] * 6

    def test_unused_categories_are_no_levels(self):
        frame = north().assign(sex=pd.Categorical(["m", "f"] * 3, categories=["x", "m", "f"]))
        assert agreed("y ~ sex", {"a": frame}).levels["sex"] == ("f", "m")

    def test_both_a_number_and_levels(self):
        found = designs("y ~ grade + C(grade)", {"a": north()})[1][0].x
        np.testing.assert_array_equal(found, model_matrix("grade + C(grade)", north()))

    def test_a_level_that_appears_after_the_handshake(self):
        schema = agreed("y ~ sex", {"a": north()})
        with pytest.raises(DataError, match=r"'b', column 'sex' holds a level that the federation did not agree on"):
            design(north().assign(sex="x"), "b", schema)

    def test_missing_codes_do_not_count(self):
        frame = pd.DataFrame({"y": [0.0, 1, 0, 1], "s": pd.array(["a", None, "b", "a"], "string")})
        schema, (found,) = designs("y ~ s", {"a": frame})
        assert found.x.tolist() == [[1, 0], [1, 1], [1, 0]]
        assert found.missing == {"s": 1}
        assert found.kept.tolist() == [0, 2, 3]
        assert schema.levels == {"s": ("a", "b")}


class TestResponses:
    def test_numbers_and_booleans(self):
        assert designs("y ~ 1", {"a": north()}, binary=True)[1][0].y.tolist() == [0, 1, 1, 0, 1, 0]
        assert designs("b ~ 1", {"a": north()}, binary=True)[1][0].y.tolist() == [1, 0, 1, 1, 0, 0]
        assert designs("I(x > 2) ~ 1", {"a": north()}, binary=True)[1][0].y.tolist() == [0, 1, 1, 0, 1]

    def test_the_second_class_is_the_event(self):
        schema, (found,) = designs("died ~ 1", {"a": north()}, binary=True)
        assert schema.event == "yes"
        assert found.y.tolist() == [1, 0, 0, 1, 0, 1]

    def test_or_the_one_that_is_named(self):
        assert designs("died ~ 1", {"a": north()}, binary=True, event="no")[1][0].y.tolist() == [0, 1, 1, 0, 1, 0]
        assert designs("grade ~ 1", {"a": north()}, binary=True, event=2)[1][0].y.tolist() == [0, 1, 1, 0, 0, 0]
        assert designs("b ~ 1", {"a": north()}, binary=True, event=False)[1][0].y.tolist() == [0, 1, 0, 0, 1, 1]

    def test_or_the_second_of_the_levels_given(self):
        levels = {"died": ["yes", "no"]}
        assert agreed("died ~ 1", {"a": north()}, levels=levels, binary=True).event == "no"

    def test_a_site_with_one_class(self):
        one = north().assign(died="yes")
        assert designs("died ~ 1", {"a": north(), "b": one}, binary=True)[1][1].y.tolist() == [1.0] * 6

    @pytest.mark.parametrize(
        ("text", "change", "options", "message"),
        [
            ("died ~ 1", {"died": "yes"}, {"binary": True}, "'died' has the class 'yes' only, at all sites"),
            ("y ~ 1", {"y": 0}, {"binary": True}, "'y' has the class '0' only"),
            (
                "died ~ 1",
                {"died": list("abcabc")},
                {"binary": True},
                "has 3 classes: name the one that counts by event=",
            ),
            ("died ~ 1", {}, {"binary": True, "event": "yse"}, "event = 'yse' is no class .*did you mean 'yes'"),
            ("died ~ 1", {}, {}, "response 'died' holds texts"),
            ("died ~ 1", {}, {"binary": True, "columns": Columns(trials="t")}, "response 'died' holds texts"),
            ("x ~ 1", {}, {"event": 3}, "event = 3 needs a response of two classes"),
        ],
    )
    def test_others_are_refused(self, text, change, options, message):
        with pytest.raises(InputError, match=message):
            agreed(text, {"a": north().assign(**change), "b": north().assign(**change)}, **options)


class TestRoles:
    def test_columns_and_expressions(self):
        columns = Columns(weights="w", offset="log(t)", trials="`t`")
        schema, (found,) = designs("y ~ 1", {"a": north()}, columns)
        assert columns.names() == ("w", "t")
        assert found.weights.tolist() == [1, 2, 1, 1, 1, 3]
        torch.testing.assert_close(found.offset, torch.tensor([2.0, 3, 4, 1, 5, 2]).log())
        assert found.trials.tolist() == [2, 3, 4, 1, 5, 2]
        assert (schema.weights, schema.offset, schema.trials) == ("w", "log(t)", "`t`")

    def test_by_default_they_do_nothing(self):
        found = designs("y ~ 1", {"a": north()})[1][0]
        assert (found.weights == 1).all()
        assert (found.offset == 0).all()
        assert (found.trials == 1).all()

    def test_odd_names_need_no_backticks(self):
        frame = north().rename(columns={"w": "sample weight"})
        assert designs("y ~ 1", {"a": frame}, Columns(weights="sample weight"))[1][0].weights.sum() == 9

    def test_their_missing_values_count(self):
        frame = north().assign(w=[np.nan, 1, 1, 1, 1, 1])
        assert designs("y ~ 1", {"a": frame}, Columns(weights="w"))[1][0].missing == {"w": 1}

    @pytest.mark.parametrize(
        ("columns", "change", "message"),
        [
            (Columns(weights="w"), {"w": [1, 1, 0, 1, 1, 1]}, "'a', row 3: weights 'w' must be positive"),
            (Columns(weights="w"), {"w": [1, -2, 0, 1, 1, 1]}, "'a', row 2: weights 'w' must be positive"),
            (Columns(trials="t"), {"t": [1, 1, 1, 1, 0, 1]}, "'a', row 5: trials 't' must be positive"),
            (Columns(trials="t"), {"y": [1, 1, 5, 1, 0, 1]}, "'a', row 3: .*more successes than trials"),
            (Columns(offset="log(t)"), {"t": [1, 1, 1, 1, 0, 1]}, "'a', row 5: offset 'log.t.' must be finite"),
            (Columns(weights="v"), {}, "'a' has no column 'v'"),
            (Columns(weights="sex"), {}, "'a', column 'sex', row 1: .*needs numbers"),
            (Columns(offset="scale(t)"), {}, "'scale.t.' cannot be used here"),
            (Columns(offset="C(sex)"), {}, "'C.sex.' cannot be used here"),
        ],
    )
    def test_others_are_refused(self, columns, change, message):
        with pytest.raises(FedualError, match=message):
            designs("y ~ 1", {"a": north().assign(**change)}, columns)


class TestDisagreement:
    @pytest.mark.parametrize(
        ("text", "change", "message"),
        [
            ("y ~ x", {"x": None}, "'b' has no column 'x'"),
            ("y ~ x", {"x": list("abcabc")}, "'x' is categorical at site 'b', but numeric at site 'a'"),
            ("y ~ x", {"x": True}, "'x' is boolean at site 'b', but numeric at site 'a'"),
            ("y ~ C(grade)", {"grade": True}, "'grade' is boolean at site 'b', but numeric at site 'a'"),
            ("y ~ x", {"x": ["1.5", "12,5", "1", "2", "3", "4"]}, "'b', column 'x', row 2: .*decimal comma"),
            ("y ~ x", {"x": ["1,5"] * 6}, "'b', column 'x', row 1: .*decimal comma"),
            (
                "y ~ x",
                {"x": ["1.5", "2", "n. a.", "2", "3", "4"]},
                "'b', column 'x', row 3: a text, but other rows hold",
            ),
            ("y ~ log(x)", {"x": list("abcabc")}, r"'b', column 'x', row 1: a text, but 'log\(x\)' needs numbers"),
            ("y ~ log(x)", {"x": list("123123")}, r"'b', column 'x' holds numbers as texts: convert"),
            ("y ~ I(sex == 'm')", {"sex": 1}, "'b', column 'sex' holds no texts, but I.sex == 'm'. compares"),
            ("y ~ x", {"x": np.nan}, "'b' has no complete row .*Every row misses 'x'"),
            ("y ~ x + w", {"x": [1, 1, 1, 1, 1, np.nan], "w": [np.nan] * 5 + [1]}, "'b' has no complete row"),
            ("y ~ x", {"x": [1, 2, np.inf, 4, 5, -np.inf]}, "'b', column 'x', row 3: an infinite value"),
            ("y ~ I(1 / x)", {"x": [1, 2, np.inf, 4, 5, 6]}, "'b', column 'x', row 3: an infinite value"),
            ("y ~ I(1 / x)", {"x": [1, 2, 3, 4, 0, 6]}, r"'b', row 5: the term 'I\(1 / x\)' is not finite"),
            ("log(y) ~ x", {}, r"row 1: the response 'log\(y\)' is not finite"),
            ("y ~ x", {"x": pd.Timestamp("2020")}, "'b', column 'x' holds values of type datetime64"),
            ("y ~ x", {"x": [1j] * 6}, "'b', column 'x' holds values of type complex"),
            ("y ~ x", {"x": [[1]] * 6}, "'b', column 'x' holds values of type object"),
            ("y ~ scale(log(x))", {"x": [1, 2, 3, 4, 0, 6]}, r"'b', row 5: 'log\(x\)' is not finite"),
        ],
    )
    def test_one_error_names_site_and_column(self, text, change, message):
        other = north()
        for name, values in change.items():
            other = other.drop(columns=name) if values is None else other.assign(**{name: values})
        with pytest.raises(FedualError, match=message) as caught:
            designs(text, {"a": north(), "b": other})
        assert "\n" not in str(caught.value)

    def test_near_names_are_suggested(self):
        with pytest.raises(DataError, match=r"'a' has no column 'Sex': did you mean 'sex'"):
            agreed("y ~ Sex", {"a": north()})

    def test_no_row(self):
        with pytest.raises(DataError, match="'b' has no row"):
            agreed("y ~ x", {"a": north(), "b": north().iloc[:0]})

    def test_a_level_with_too_few_rows(self):
        with pytest.raises(InputError, match=r"'grade' has a level with too few rows at site 'a'.*levels="):
            agreed("y ~ C(grade)", {"a": north()}, least=2)
        schema = agreed("y ~ C(grade)", {"a": north()}, least=2, levels={"grade": [1, 2, 3, 10]})
        assert schema.levels["grade"] == ("1", "2", "3", "10")

    def test_one_level_at_all_sites(self):
        with pytest.raises(InputError, match="'sex' has the level 'm' only, at all sites"):
            agreed("y ~ sex", {"a": north().assign(sex="m"), "b": north().assign(sex="m")})

    def test_a_base_level_that_does_not_exist(self):
        with pytest.raises(InputError, match="'male' is no level of 'sex': "):
            agreed("y ~ C(sex, Treatment('male'))", {"a": north()})

    def test_the_dot_stands_for_the_same_everywhere(self):
        with pytest.raises(InputError, match=r"'z' is at 'b', not at 'a'.*name the columns in the formula"):
            agreed("y ~ .", {"a": north(), "b": north().assign(z=1.0)})
        turned = north().filter(["x", "y", "w"])
        assert agreed("y ~ .", {"a": north().filter(["y", "x", "w"]), "b": turned}).terms == ("Intercept", "x", "w")

    def test_levels_of_other_columns(self):
        with pytest.raises(InputError, match=r"levels= has 'sx', .*did you mean 'sex'"):
            agree(parse("y ~ sex"), NONE, {"a": described("y ~ sex", north())[0]}, {"sx": ["a"]})

    def test_too_many_columns(self):
        frame = pd.DataFrame({"y": np.arange(200.0), "g": np.arange(200), "h": np.arange(200)})
        with pytest.raises(InputError, match="up to 40001 columns"):
            agreed("y ~ C(g):C(h)", {"a": frame})

    def test_two_columns_of_one_name(self):
        frame = north().assign(**{"x:w": 1.0})
        with pytest.raises(InputError, match="two columns 'x:w'"):
            agreed("y ~ `x:w` + x:w", {"a": frame})


class TestDesign:
    def test_rows_with_missing_values_are_left_out_and_counted(self):
        found = designs("y ~ x + sex", {"a": north()})[1][0]
        assert found.missing == {"x": 1, "sex": 1}
        assert found.kept.tolist() == [0, 1, 4, 5]
        assert found.y.tolist() == [0, 1, 1, 0]
        assert found.x.dtype == found.y.dtype == torch.float64

    def test_digests_tell_rows_apart(self):
        schema, (found,) = designs("y ~ x + sex", {"a": north()})
        assert len(set(found.row_digests)) == 4
        assert found.row_digests.dtype == np.uint64
        fewer = design(north().iloc[[5, 0, 4]], "a", schema).row_digests
        assert fewer.tolist() == found.row_digests[[3, 0, 2]].tolist()
        changed = design(north().assign(sex=["f", *north()["sex"][1:]]), "a", schema).row_digests
        assert (changed != found.row_digests).tolist() == [True, False, False, False]

    def test_digests_do_not_depend_on_how_the_table_is_kept(self):
        frame = north().assign(grade=[1.0, 2, 2, 3, 10, 1], sex=pd.Categorical(north()["sex"]))
        schema, (found,) = designs("y ~ x + sex + C(grade)", {"a": north()})
        assert design(frame, "b", schema).row_digests.tolist() == found.row_digests.tolist()

    def test_predictions_need_no_response(self):
        columns = Columns(weights="w", offset="t")
        schema = agreed("died ~ x + scale(w)", {"a": north()}, columns, binary=True)
        found = design(north().filter(["x", "w", "t"]), "new", schema, response=False)
        assert found.y.isnan().all()
        assert found.kept.tolist() == [0, 1, 3, 4, 5]
        assert found.offset.tolist() == [2, 3, 1, 5, 2]
        fitted = design(north(), "a", schema)
        torch.testing.assert_close(found.x, fitted.x, rtol=0, atol=0)
        none = design(north().filter(["x", "w", "t"]).assign(x=np.nan), "new", schema, response=False)
        assert none.x.shape == (0, 3)

    def test_weights_are_not_needed_for_predictions(self):
        schema = agreed("y ~ x", {"a": north()}, Columns(weights="w"))
        assert (design(north().filter(["x"]), "new", schema, response=False).weights == 1).all()

    def test_the_offset_is(self):
        schema = agreed("y ~ x", {"a": north()}, Columns(offset="w"))
        with pytest.raises(DataError, match="'new' has no column 'w'"):
            design(north().filter(["x"]), "new", schema, response=False)

    def test_a_column_that_changed_since_the_handshake(self):
        schema = agreed("y ~ x", {"a": north()})
        with pytest.raises(DataError, match="'a', column 'x' is categorical, not numeric as agreed"):
            design(north().assign(x=list("abcabc")), "a", schema)

    def test_integers_nullable_and_object_columns(self):
        frame = north().assign(
            grade=pd.array([1, None, 2, 3, 10, 1], "Int64"),
            w=np.array([1, 2.5, None, 1, 1, 1], object),
            b=np.array([True, False, True, None, False, False], object),
        )
        found = designs("y ~ grade + w + b", {"a": frame})[1][0]
        assert found.missing == {"grade": 1, "w": 1, "b": 1}
        assert found.x.tolist() == [[1, 1, 1, 1], [1, 10, 1, 0], [1, 1, 1, 0]]

    def test_csv_frame_and_parquet_give_the_same(self, tmp_path):
        north().to_csv(tmp_path / "n.csv", index=False)
        north().to_parquet(tmp_path / "n.parquet", index=False)
        schema = agreed("died ~ x * sex + C(grade) + b", {"a": north()}, binary=True)
        expected = design(north(), "a", schema)
        for name in ("n.csv", "n.parquet"):
            found = design(read(tmp_path / name, "a"), "a", schema)
            torch.testing.assert_close(found.x, expected.x, rtol=0, atol=0)
            assert found.y.tolist() == expected.y.tolist()
            assert found.row_digests.tolist() == expected.row_digests.tolist()


class TestSchema:
    def test_it_is_json(self):
        frame = north().rename(columns={"sex": "type"})
        schema = agreed("y ~ type + bs(x, 4) + poly(w, 2)", {"a": frame})
        assert Schema.from_dict(sent(schema.to_dict())) == schema

    @pytest.mark.parametrize("change", [{"version": 2}, {"more": 1}, {"formula": None}])
    def test_others_are_refused(self, change):
        values = agreed("y ~ x", {"a": north()}).to_dict() | change
        if values["formula"] is None:
            del values["formula"]
        with pytest.raises(InputError, match="one version of fedual"):
            Schema.from_dict(values)

    def test_terms_that_are_not_the_formulas(self):
        schema = agreed("y ~ x", {"a": north()}).to_dict() | {"terms": ["Intercept", "z"]}
        with pytest.raises(InputError, match="not those of its formula"):
            design(north(), "a", Schema.from_dict(schema))

    def test_states_are_needed(self):
        schema = agreed("y ~ scale(x)", {"a": north()}).to_dict()
        with pytest.raises(InputError, match=r"no state of 'scale\(x\)'"):
            design(north(), "a", Schema.from_dict(schema | {"states": {}}))

    def test_a_site_measures_only_what_the_formula_calls(self):
        schema = agreed("y ~ scale(x)", {"a": north()})
        with pytest.raises(InputError, match=r"does not call 'scale\(w\)'"):
            measure(north(), "a", schema, {"scale(w)": "moments"})
        with pytest.raises(InputError, match="'histogram' is not what this function needs"):
            measure(north(), "a", schema, {"scale(x)": "histogram"})
