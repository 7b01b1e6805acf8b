/** The exports that the component uses. */

export { LiveView } from "./live_view.js";
export { TABLE_COLUMNS, blockTip, laneTip } from "./status.js";
export { WIDTHS_S } from "./time_window.js";
