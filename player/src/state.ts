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

/** How many there are of what is counted. */
export interface Limits {
  ranks: number;
  steps: number;
  faults: number;
}

/** Read an address such as "#at=2&alpha=10"; what is no word of ours, or no number that makes sense, is left out. */
export function read(hash: string, initial: State, limits: Limits): State {
  const state = { ...initial };
  const values = state as unknown as Record<string, number | string>;
  const isRank = (value: number): boolean => Number.isInteger(value) && value >= -1 && value < limits.ranks;
  const isSense: Record<string, (value: number) => boolean> = {
    at: (value) => value >= 0,
    alpha: (value) => value >= 0 && value <= 1e9,
    bandwidth: (value) => value >= 1e-9 && value <= 1e9,
    reduction: (value) => value >= 1e-9 && value <= 1e9,
    nbytes: (value) => Number.isInteger(value) && value >= 0 && value <= 2 ** 50,
    fault: (value) => Number.isInteger(value) && value >= 0 && value <= limits.faults,
    slow: isRank,
    dead: isRank,
    deadStep: (value) => Number.isInteger(value) && value >= 0 && value <= limits.steps,
    scene: (value) => value === 0 || value === 1,
    rank: (value) => Number.isInteger(value) && value >= -1,
    chunk: (value) => Number.isInteger(value) && value >= -1,
  };
  const words: Record<string, string[]> = { clock: ["steps", "time"], times: ["model", "trace"] };
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const isNumber = text !== "" && Object.hasOwn(isSense, name) && isSense[name]!(Number(text));
    if (isNumber) values[name] = Number(text);
    else if (Object.hasOwn(words, name) && words[name]!.includes(text)) values[name] = text;
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
