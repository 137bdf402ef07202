/** What the user has set. It stands in the address of the page, so that a link shows the same. */
export interface State {
  /** Steps that are over, or seconds; between two steps a fraction. */
  at: number;
  clock: "steps" | "time";
  times: "model" | "trace";
  /** Microseconds. */
  alpha: number;
  /** GB/s of messages and of reductions. */
  bandwidth: number;
  reduction: number;
  nbytes: number;
  /** Number of the fault, from 1; 0 for none. */
  fault: number;
  slow: number;
  dead: number;
  deadStep: number;
  /** The cell whose provenance is shown: a rank and a chunk of a scene; -1 for none. */
  scene: number;
  rank: number;
  chunk: number;
}

export const INITIAL: State = {
  at: 0,
  clock: "steps",
  times: "model",
  alpha: 1,
  bandwidth: 10,
  reduction: 100,
  nbytes: 1 << 20,
  fault: 0,
  slow: -1,
  dead: -1,
  deadStep: 0,
  scene: 0,
  rank: -1,
  chunk: -1,
};

/** Read an address such as "#at=2&alpha=10"; what is no number, or no word of ours, is left out. */
export function read(hash: string, initial: State): State {
  const state = { ...initial };
  const values = state as unknown as Record<string, number | string>;
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (name === "clock" || name === "times") {
      if (["steps", "time", "model", "trace"].includes(text)) values[name] = text;
    } else if (name in INITIAL && text !== "" && Number.isFinite(Number(text))) {
      values[name] = Number(text);
    }
  }
  return state;
}

export function write(state: State, initial: State): string {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value === initial[name as keyof State]) continue;
    words.set(name, typeof value === "number" ? String(Number(value.toPrecision(6))) : value);
  }
  return words.toString();
}
