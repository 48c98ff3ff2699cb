/** Dataset: what a training set is made of, which runs it left out and why, and its samples as the trainer reads them. */
import { useMemo, useState } from "preact/hooks";
import { CopyAs, quoted } from "../components/copy_as";
import { DatasetDiff } from "../components/dataset_diff";
import { Facts } from "../components/facts";
import { Funnel } from "../components/funnel";
import { Histogram, type HistogramData } from "../components/histogram";
import { RunLink, ScreenLink } from "../components/screen_link";
import { Empty, Failure, Loaded, NotShown } from "../components/states";
import { Pages, sorted, Table } from "../components/table";
import { Text } from "../components/text";
import { Legend, MEASURES, TokenFacts, Tokens, type Measure, type TurnTokens } from "../components/tokens";
import { address, get, request } from "../lib/api";
import { compact, number, oneLine, time } from "../lib/format";
import { useKeys } from "../lib/keyboard";
import type { components } from "../lib/openapi";
import { useResource } from "../lib/resource";
import { go, href, setParams } from "../lib/route";
import { openRun } from "../lib/run_list";
import type { ScreenProps } from ".";

type Sample = components["schemas"]["ShownSample"];
const PAGE = 50;
const SPLITS = ["train", "validation"] as const;
const COLOURS: readonly Measure[] = ["trained", "logprob", "advantage"];

export default function Dataset({ path, params }: ScreenProps) {
  const id = path[0];
  const other = params.get("against");
  if (id && other) return <DatasetDiff key={`${id} ${other}`} one={id} other={other} params={params} />;
  return id ? <One key={id} id={id} params={params} /> : <List params={params} />;
}

function List({ params }: { params: URLSearchParams }) {
  const after = params.get("after") ?? undefined;
  const list = useResource(
    (signal) => get("/v1/datasets", { query: { limit: PAGE, after } as never, signal }),
    [after],
    ["dataset"],
  );
  const all = list.data?.data ?? [];
  const [rows, sort] = sorted(
    all,
    {
      "training set": (one) => one.id,
      method: (one) => one.method,
      samples: (one) => one.samples,
      "trained tokens": (one) => one.trained_tokens,
      "accepted runs": (one) => one.accepted_runs,
      considered: (one) => one.considered_runs,
      built: (one) => one.created,
    },
    !after && !list.data?.has_more,
  );
  const chosen = rows.findIndex((one) => one.id === params.get("at"));
  const select = (n: number) => rows[n] && setParams({ at: rows[n].id });
  const marked = (params.get("marked") ?? "").split(",").filter(Boolean);
  const mark = (id: string) =>
    setParams({ marked: (marked.includes(id) ? marked.filter((one) => one !== id) : [...marked, id].slice(-2)).join() });
  // the older one is what was before
  const compare = () => {
    const [newer, older] = all.filter((one) => marked.includes(one.id));
    if (newer && older) go(href(["dataset", older.id], { against: newer.id }));
  };
  useKeys({
    j: ["next training set", () => select(Math.min(rows.length - 1, chosen + 1))],
    k: ["previous training set", () => select(Math.max(0, chosen - 1))],
    Enter: ["open the training set", () => rows[chosen] && go(href(["dataset", rows[chosen].id]))],
    x: ["mark the training set, to compare two", () => rows[chosen] && mark(rows[chosen].id)],
    c: ["compare the two marked training sets", compare],
  });
  return (
    <>
      <div class="row">
        <h1>Datasets</h1>
        <span class="spacer" />
        <button disabled={marked.length < 2} onClick={compare}>
          Compare the marked two
        </button>
        <CopyAs cli="cray-agents dataset list" path="/v1/datasets" />
      </div>
      <Loaded of={list}>
        {({ data, has_more }) =>
          data.length === 0 ? (
            <Empty>No training set was built yet. "cray-agents dataset build" makes one of stored runs.</Empty>
          ) : (
            <div class="section">
              <Table
                label="Training sets"
                heads={["marked", "training set", "method", "samples#", "trained tokens#", "accepted runs#", "considered#", "built"]}
                selected={chosen}
                sort={sort}
                rows={rows.map((one) => [
                  <input
                    type="checkbox"
                    aria-label={`mark ${oneLine(one.id, 60)}`}
                    checked={marked.includes(one.id)}
                    onChange={() => mark(one.id)}
                  />,
                  <ScreenLink to={["dataset", one.id]}>{oneLine(one.id, 60)}</ScreenLink>,
                  oneLine(one.method, 20),
                  number(one.samples),
                  compact(one.trained_tokens),
                  number(one.accepted_runs),
                  number(one.considered_runs),
                  time(one.created),
                ])}
              />
              <Pages after={after} next={has_more && data.at(-1)?.id} />
            </div>
          )
        }
      </Loaded>
    </>
  );
}

function One({ id, params }: { id: string; params: URLSearchParams }) {
  const sent = (signal: AbortSignal) => ({ path: { dataset_id: id }, signal });
  const manifest = useResource((signal) => get("/v1/datasets/{dataset_id}", sent(signal)), [id]);
  const histograms = useResource((signal) => get("/v1/datasets/{dataset_id}/histograms", sent(signal)), [id]);
  return (
    <>
      <div class="row">
        <h1>
          Dataset <span class="mono">{oneLine(id, 80)}</span>
        </h1>
        {manifest.data && <span class="chip">{oneLine(manifest.data.method, 20)}</span>}
        <span class="spacer" />
        <CompareWith id={id} />
        <CopyAs
          cli={`cray-agents dataset show ${quoted(id)}`}
          python={`await Platform().views.histograms(${JSON.stringify(id)})`}
          path={address("/v1/datasets/{dataset_id}", { dataset_id: id })}
        />
      </div>
      <Loaded of={manifest}>
        {(data) => (
          <div class="section">
            <div class="cards">
              <section class="card">
                <h2>What it is</h2>
                <Facts
                  of={[
                    ["method", oneLine(data.method, 40)],
                    ["samples", number(data.samples)],
                    ["trained tokens", compact(data.trained_tokens)],
                    ["runs", `${number(data.accepted_runs)} of ${number(data.considered_runs)} considered`],
                    ["to train on it", <code class="command">cray-agents jobs submit --dataset {quoted(id)} --parent NAME</code>],
                  ]}
                />
              </section>
              <section class="card">
                <h2>Considered, accepted, left out</h2>
                <Loaded of={histograms}>{({ funnel }) => <Funnel dataset={id} counts={funnel} />}</Loaded>
              </section>
              <section class="card">
                <h2>Sampled by</h2>
                <Loaded of={histograms}>{({ versions, samples }) => <Versions versions={versions} samples={samples} />}</Loaded>
              </section>
              <section class="card wide">
                <h2>Distributions</h2>
                <Loaded of={histograms}>
                  {(all) => (
                    <div class="histograms">
                      <Histogram name="reward of considered runs" data={all.reward as HistogramData} />
                      <Histogram name="tokens of a sample" data={all.tokens as HistogramData} />
                      <Histogram name="trained tokens of a sample" data={all.trained_tokens as HistogramData} />
                    </div>
                  )}
                </Loaded>
              </section>
            </div>
            <Samples id={id} params={params} />
            <Considered id={id} params={params} />
            <Card id={id} />
          </div>
        )}
      </Loaded>
    </>
  );
}

function CompareWith({ id }: { id: string }) {
  const [text, setText] = useState("");
  const list = useResource((signal) => get("/v1/datasets", { query: { limit: PAGE } as never, signal }), []);
  return (
    <form
      class="row"
      onSubmit={(event) => {
        event.preventDefault();
        if (text.trim()) go(href(["dataset", id], { against: text.trim() }));
      }}
    >
      <input
        aria-label="Compare with the training set"
        placeholder="compare with …"
        list="training-sets"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <datalist id="training-sets">
        {list.data?.data.filter((one) => one.id !== id).map((one) => <option key={one.id} value={one.id} />)}
      </datalist>
      <button>Compare</button>
    </form>
  );
}

function Versions({ versions, samples }: { versions: Record<string, number>; samples: number }) {
  const list = Object.entries(versions);
  if (!list.length) return <Empty>No version sampled it: it is made of demonstrations.</Empty>;
  return (
    <dl class="funnel">
      {list.slice(0, 20).map(([name, count]) => (
        <div key={name}>
          <dt>
            <ScreenLink to={["models"]} params={{ at: name }}>
              {oneLine(name, 60)}
            </ScreenLink>
          </dt>
          <dd class="number">{number(count)}</dd>
          <dd class="quiet">samples</dd>
          <dd class="bar" aria-hidden="true">
            <span style={{ width: `${Math.min(100, (100 * count) / Math.max(samples, 1))}%` }} />
          </dd>
        </div>
      ))}
      <NotShown count={list.length - 20} what="versions" />
    </dl>
  );
}

function Samples({ id, params }: { id: string; params: URLSearchParams }) {
  const split = SPLITS.find((one) => one === params.get("split")) ?? "train";
  const at = Math.max(0, Math.floor(Number(params.get("at")) || 0));
  const measure = COLOURS.find((one) => one === params.get("color")) ?? "trained";
  const page = useResource(
    (signal) =>
      get("/v1/datasets/{dataset_id}/samples", {
        path: { dataset_id: id },
        query: { split, at, limit: 1 } as never,
        signal,
      }),
    [id, split, at],
  );
  const total = page.data?.total ?? 0;
  const show = (n: number) => total > 0 && setParams({ at: Math.min(total - 1, Math.max(0, n)), tok: null });
  useKeys({
    "]": ["next sample", () => show(at + 1)],
    "[": ["previous sample", () => show(at - 1)],
  });
  return (
    <section class="card wide">
      <div class="row" style={{ marginBottom: "0.5rem" }}>
        <h2 style={{ margin: 0 }}>Samples</h2>
        <select
          aria-label="Split"
          value={split}
          onChange={(event) => setParams({ split: event.currentTarget.value, at: null, tok: null })}
        >
          {SPLITS.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
        <select
          aria-label="Colour"
          value={measure}
          onChange={(event) => setParams({ color: event.currentTarget.value })}
        >
          {COLOURS.map((one) => (
            <option key={one} value={one}>
              {MEASURES[one]}
            </option>
          ))}
        </select>
        <button disabled={at === 0} onClick={() => show(at - 1)}>
          Previous
        </button>
        <button disabled={at + 1 >= total} onClick={() => show(at + 1)}>
          Next
        </button>
        <span class="quiet">{total ? `${number(Math.min(at + 1, total))} of ${number(total)}` : ""}</span>
        <span class="spacer" />
        <Legend measure={measure} />
      </div>
      <Loaded of={page}>
        {({ data }) =>
          data[0] ? (
            <SampleView sample={data[0]} measure={measure} params={params} />
          ) : (
            <Empty>{total ? `There are ${number(total)} samples: none has this number.` : `No sample is in the split "${split}".`}</Empty>
          )
        }
      </Loaded>
    </section>
  );
}

function SampleView({ sample, measure, params }: { sample: Sample; measure: Measure; params: URLSearchParams }) {
  const tokens = useMemo(() => asTokens(sample), [sample]);
  const text = params.get("tok");
  const place = text === null ? null : Number(text);
  return (
    <>
      <p class="row quiet">
        {sample.run ? <RunLink id={sample.run} /> : <span>a demonstration</span>}
        <span>{sample.reward === null ? "no reward" : `reward ${number(sample.reward)}`}</span>
        <span>{number(sample.ids.length)} tokens</span>
        <span>{number(sample.trained.filter(Boolean).length)} trained on</span>
        {sample.texts === null && <span>its tokenizer is not here: ids are shown</span>}
      </p>
      <Tokens tokens={tokens} advantages={sample.advantages} measure={measure} selected={place} onSelect={(n) => setParams({ tok: n })} />
      {place !== null && <TokenFacts tokens={tokens} advantages={sample.advantages} place={place} />}
    </>
  );
}

/** Return a sample in the shape of a turn's tokens, for the view of these. */
function asTokens(sample: Sample): TurnTokens {
  return {
    id: sample.run ?? "",
    n: sample.at,
    model: sample.versions.join(", "),
    tokenizer: "",
    first: 0,
    prompt: 0,
    total: sample.ids.length,
    ids: sample.ids,
    texts: sample.texts ?? sample.ids.map((id) => `${id} `),
    bytes: sample.bytes,
    logprobs: sample.logprobs,
    trained: sample.trained,
    seams: [],
    exact: true,
  };
}

function Considered({ id, params }: { id: string; params: URLSearchParams }) {
  const reason = params.get("reason") ?? "";
  const which = params.get("show") ?? "";
  const after = params.get("after") ?? "";
  const [marked, setMarked] = useState(-1);
  const runs = useResource(
    (signal) =>
      get("/v1/datasets/{dataset_id}/runs", {
        path: { dataset_id: id },
        query: {
          reason: reason || undefined,
          accepted: which === "in" ? "true" : which === "out" ? "false" : undefined,
          after: after || undefined,
          limit: PAGE,
        } as never,
        signal,
      }),
    [id, reason, which, after],
  );
  const [rows, sort] = sorted(
    runs.data?.data ?? [],
    {
      run: (one) => one.run,
      task: (one) => one.task,
      reward: (one) => one.reward,
      "in the set": (one) => (one.accepted ? "accepted" : "left out"),
      "why not": (one) => one.reason,
      samples: (one) => one.samples,
    },
    !after && !runs.data?.has_more,
  );
  useKeys({
    j: ["next run", () => setMarked(Math.min(rows.length - 1, marked + 1))],
    k: ["previous run", () => setMarked(Math.max(0, marked - 1))],
    Enter: ["open the run", () => openRun(rows[marked]?.run)],
  });
  const choose = (show: string) => setParams({ show, reason: null, after: null });
  return (
    <section class="card wide">
      <div class="row" style={{ marginBottom: "0.5rem" }}>
        <h2 style={{ margin: 0 }}>Runs</h2>
        {(["", "in", "out"] as const).map((one) => (
          <button key={one} aria-pressed={!reason && which === one} onClick={() => choose(one)}>
            {{ "": "all", in: "accepted", out: "left out" }[one]}
          </button>
        ))}
        {reason && (
          <button aria-pressed="true" onClick={() => choose("")} title="Show all again">
            {oneLine(reason.replace(/_/g, " "), 60)} ✕
          </button>
        )}
      </div>
      <Loaded of={runs}>
        {({ data, has_more }) =>
          data.length === 0 ? (
            <Empty>No run that was considered matches.</Empty>
          ) : (
            <>
              <Table
                label="Considered runs"
                heads={["run", "task", "reward#", "in the set", "why not", "samples#"]}
                selected={marked}
                sort={sort}
                rows={rows.map((one) => [
                  <RunLink id={one.run} />,
                  one.task ? oneLine(one.task, 40) : "–",
                  number(one.reward),
                  <span class={`chip ${one.accepted ? "good" : "bad"}`}>{one.accepted ? "accepted" : "left out"}</span>,
                  <>
                    {one.reason ? oneLine(one.reason.replace(/_/g, " "), 60) : "–"}
                    {one.detail && <div class="quiet">{oneLine(one.detail, 200)}</div>}
                  </>,
                  number(one.samples),
                ])}
              />
              <div class="row" style={{ marginTop: "0.5rem" }}>
                {after && <button onClick={() => setParams({ after: null })}>First ones</button>}
                {has_more && <button onClick={() => setParams({ after: data.at(-1)?.run })}>More</button>}
              </div>
            </>
          )
        }
      </Loaded>
    </section>
  );
}

function Card({ id }: { id: string }) {
  const card = useResource(
    async (signal) =>
      (
        await request("GET", address("/v1/datasets/{dataset_id}/card", { dataset_id: id }), undefined, signal, "text/markdown")
      ).text(),
    [id],
  );
  return (
    <section class="card wide">
      <h2>Card</h2>
      {card.error ? <Failure error={card.error} /> : <Loaded of={card}>{(text) => <Text text={text} lines={24} label="the card" />}</Loaded>}
    </section>
  );
}
