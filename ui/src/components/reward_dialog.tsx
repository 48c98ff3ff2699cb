/** Reward dialog: a person's reward of a run or of one turn. */
import { useState } from "preact/hooks";
import { post } from "../lib/api";
import { Action } from "./action";
import { quoted } from "./copy_as";

export interface RewardProps {
  run: string;
  turn?: number;
  value?: number;
  name?: string;
  close: () => void;
  done: () => void;
}

export function RewardDialog(props: RewardProps) {
  const [value, setValue] = useState(String(props.value ?? 1));
  const [name, setName] = useState(props.name ?? "feedback");
  const [ofTurn, setOfTurn] = useState(false);
  const turn = ofTurn ? props.turn : undefined;
  return (
    <Action
      title="Give the reward"
      cli={(comment) =>
        [
          `cray-agents runs reward ${quoted(props.run)} ${value} --name ${quoted(name)}`,
          turn === undefined ? "" : ` --turn ${turn + 1}`,
          comment ? ` --comment ${quoted(comment)}` : "",
        ].join("")
      }
      act={async (comment) => {
        await post("/v1/trajectories/{run_id}/rewards", {
          path: { run_id: props.run },
          body: { value: Number(value), name, comment: comment || null, turn: turn ?? null } as never,
        });
        props.done();
      }}
      close={props.close}
    >
      <div class="row">
        <label>
          Value{" "}
          <input
            type="number"
            step="any"
            required
            autofocus
            value={value}
            onInput={(event) => setValue(event.currentTarget.value)}
          />
        </label>
        <label>
          Name <input required value={name} onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        {props.turn !== undefined && (
          <label>
            <input type="checkbox" checked={ofTurn} onChange={(event) => setOfTurn(event.currentTarget.checked)} /> of
            turn {props.turn + 1} alone
          </label>
        )}
      </div>
    </Action>
  );
}
