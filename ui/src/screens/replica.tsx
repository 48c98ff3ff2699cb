/** Replica: its state, the version in it, and the end of its log. */
import type { ComponentChildren } from "preact";
import { ReplicaState, Version } from "../components/chips";
import { CopyAs } from "../components/copy_as";
import { Facts } from "../components/facts";
import { Json } from "../components/json";
import { Failure, Loaded } from "../components/states";
import { Text } from "../components/text";
import { address, get, request } from "../lib/api";
import { ago, number, oneLine, told } from "../lib/format";
import { useResource } from "../lib/resource";
import type { ScreenProps } from ".";
import type { Replica } from "./overview";

const NAMES: Record<string, string> = { probe: "logprob check", busy_seconds: "seconds with requests", in_flight: "requests" };
const APART = ["state", "version", "last_restart", "error"]; // told in words

export default function ReplicaScreen({ path }: ScreenProps) {
  const text = path[0] ?? "";
  const n = Number(text);
  const pool = useResource((signal) => get("/v1/pool", { signal }), [], ["pool", "model"]);
  const log = useResource(
    async (signal) =>
      (await request("GET", address("/v1/pool/{replica}/log", { replica: n }, { tail: 60 }), undefined, signal, "text/plain")).text(),
    [n],
    ["pool"],
  );
  if (!/^\d{1,6}$/.test(text)) return <Failure error={new Error("The address names no replica: it is #/replica/0.")} />;
  return (
    <>
      <div class="row">
        <h1>replica-{n}</h1>
        <span class="spacer" />
        <CopyAs cli={`cray-agents why replica-${n}`} path="/v1/pool" python="await Platform().pool(spares=True)" />
      </div>
      <div class="section">
        <Loaded of={pool}>
          {(data) => {
            const replica = [...data.data, ...data.spares][n] as Replica | undefined;
            if (!replica) return <Failure error={new Error(`There is no replica-${n}.`)} />;
            const rest = Object.entries(replica).filter(([name, value]) => !APART.includes(name) && value !== null && value !== "");
            return (
              <section class="card wide">
                <p>
                  <ReplicaState of={replica} /> <Version id={replica.version} />
                </p>
                {typeof replica.error === "string" && <p class="error-text">{oneLine(replica.error, 1000)}</p>}
                {replica.last_restart && (
                  <p>
                    It was lost {ago(replica.last_restart.time)}: {oneLine(replica.last_restart.why, 500)}
                  </p>
                )}
                <Facts of={rest.map(([name, value]) => [NAMES[name] ?? oneLine(name.replace(/_/g, " "), 40), shown(value)])} />
              </section>
            );
          }}
        </Loaded>
        <section class="card wide">
          <h2>Log</h2>
          <Loaded of={log}>{(lines) => <div class="mono">{lines ? <Text text={lines} lines={60} characters={12_000} label="the log" /> : "Nothing is logged: another process started it, or it has not started."}</div>}</Loaded>
        </section>
      </div>
    </>
  );
}

function shown(value: unknown): ComponentChildren {
  if (Array.isArray(value)) return oneLine(value.map(told).join(", "), 300);
  return typeof value === "object" ? <Json value={value} /> : oneLine(typeof value === "number" ? number(value) : told(value), 300);
}
